"""Runs of similar keys, packed into one row each, and what is remembered of them between chunks.

Shape suffixes as in `interface.py`; C pack chunks (of `chunk` tokens, complete ones only), P packed rows of
one key head in the order of their positions, R runs of one pack chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ...anchors.runs import AnchorRuns
from ...anchors.scan import scan
from ...interface import BLOCK, AttentionInput, KernelInputError, StateSpec


class Runs(Protocol):
    """Splits rows into runs of consecutive rows that never cross a chunk boundary."""

    def __call__(self, k_BGSD: torch.Tensor, first_chunk: int, chunk: int) -> AnchorRuns: ...


@dataclass(frozen=True)
class SimilarRuns:
    """DeltaAttention section 3.1: a key joins its anchor's run while their cosine is at least `cos`."""

    cos: float

    def __call__(self, k_BGSD: torch.Tensor, first_chunk: int, chunk: int) -> AnchorRuns:
        del first_chunk
        return scan(k_BGSD, self.cos, chunk, "cosine")


@dataclass
class PackedRuns:
    """Where the runs of the complete chunks begin, for one layer of one prompt.

    start_BGP: int32, position of the first row of each run; run p ends where run p+1 begins. The slot after
    the last run holds the end of the last complete chunk. offset_BGC: int32, entry c is the number of runs in
    the chunks before c. chunks: complete chunks so far (known to the host without reading the device).
    """

    start_BGP: torch.Tensor
    offset_BGC: torch.Tensor
    max_tokens: int
    chunks: int = 0

    @classmethod
    def empty(cls, spec: StateSpec, chunk: int) -> PackedRuns:
        heads = (spec.batch, spec.kv_heads)
        chunks = spec.max_tokens // chunk
        start = torch.zeros(*heads, chunks * chunk + 2, dtype=torch.int32, device=spec.device)
        offset = torch.zeros(*heads, chunks + 1, dtype=torch.int32, device=spec.device)
        return cls(start, offset, spec.max_tokens)

    def check(self, x: AttentionInput, name: str) -> None:
        """Raise unless this state was made for inputs like x."""
        heads, keys = tuple(x.k_BGSD.shape[:2]), x.k_BGSD.shape[2]
        if tuple(self.offset_BGC.shape[:2]) != heads or self.offset_BGC.device != x.k_BGSD.device:
            raise KernelInputError(
                f"{name}: the state is for batch and key heads {tuple(self.offset_BGC.shape[:2])} on "
                f"{self.offset_BGC.device}, the keys have {heads} on {x.k_BGSD.device}"
            )
        if keys > self.max_tokens:
            raise KernelInputError(f"{name}: {keys} keys exceed the state's max_tokens {self.max_tokens}")

    def extend(self, k_BGSD: torch.Tensor, chunk: int, runs: Runs) -> None:
        """Find the runs of the chunks completed since the last call. No host sync."""
        complete = k_BGSD.shape[2] // chunk
        if complete <= self.chunks:
            return
        begin = self.chunks * chunk
        found = runs(k_BGSD[:, :, begin : complete * chunk], self.chunks, chunk)
        self._append(found, begin, complete)

    def _append(self, found: AnchorRuns, begin: int, complete: int) -> None:
        before_BG1 = self.offset_BGC[:, :, self.chunks, None]
        total_BGC = before_BG1 + found.runs_BGC.cumsum(-1, dtype=torch.int32)
        self.offset_BGC[:, :, self.chunks + 1 : complete + 1] = total_BGC
        slot_R = torch.arange(found.first_BGCR.shape[-1], device=total_BGC.device)
        place_BGCR = (total_BGC - found.runs_BGC)[..., None] + slot_R
        unused = self.start_BGP.shape[-1] - 1  # the last slot takes what is not a run
        place_BGCR = torch.where(slot_R < found.runs_BGC[..., None], place_BGCR, unused)
        self.start_BGP.scatter_(2, place_BGCR.flatten(2).long(), (found.first_BGCR + begin).flatten(2))
        end = torch.full_like(total_BGC[..., -1:], begin + found.runs_BGC.shape[-1] * slot_R.numel())
        self.start_BGP.scatter_(2, total_BGC[..., -1:].long(), end)
        self.chunks = complete


def packed_chunks(first_block: int, query_blocks: int, critical: int, chunk: int) -> list[int]:
    """For each query block, how many pack chunks lie wholly before its last `critical` tokens."""
    return [max(0, (first_block + n) * BLOCK - critical) // chunk for n in range(query_blocks)]
