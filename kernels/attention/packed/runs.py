"""The state that packed attention keeps between prefill chunks: where each run of similar keys begins.

Shape suffixes: C complete pack chunks, P packed rows of one key head, R rows of one pack chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltafront.kernels.anchor_scan import find_anchors
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, KernelInputError, StateSpec


@dataclass
class PackedRuns:
    """The runs of similar keys in one layer and prompt. Covers only full pack chunks so far.

    Attributes:
        start_BGP: int32, position of each run's first row; after the last run, its end.
        offset_BGC: int32, runs before each chunk.
        chunks: Number of complete chunks. The host knows it without a synchronisation.
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
        """Check that this state fits x's batch, heads, device and length. Raises KernelInputError."""
        heads, keys = tuple(x.k_BGSD.shape[:2]), x.k_BGSD.shape[2]
        if tuple(self.offset_BGC.shape[:2]) != heads or self.offset_BGC.device != x.k_BGSD.device:
            raise KernelInputError(
                f"{name}: the state is for batch and key heads {tuple(self.offset_BGC.shape[:2])} on "
                f"{self.offset_BGC.device}, the keys have {heads} on {x.k_BGSD.device}"
            )
        if keys > self.max_tokens:
            raise KernelInputError(f"{name}: {keys} keys exceed the state's max_tokens {self.max_tokens}")

    def runs_a_block(self) -> float | None:
        """Return the mean number of runs in 128 keys; None before the first pack chunk."""
        runs_BG = self.offset_BGC[:, :, self.chunks]
        rows_BG1 = self.start_BGP.gather(2, runs_BG[..., None].long())
        return float(BLOCK * runs_BG.sum() / rows_BG1.sum()) if self.chunks else None

    def extend(self, k_BGSD: torch.Tensor, chunk: int, cos: float) -> None:
        """Find the runs of pack chunks that k_BGSD completes, without a synchronisation."""
        complete = k_BGSD.shape[2] // chunk
        if complete <= self.chunks:
            return
        begin = self.chunks * chunk
        found_BGS = find_anchors(k_BGSD[:, :, begin : complete * chunk], cos, chunk)
        self._append(found_BGS.reshape(*found_BGS.shape[:2], -1, chunk), begin)
        self.chunks = complete

    def _append(self, is_anchor_BGCR: torch.Tensor, begin: int) -> None:
        batch, heads, chunks, rows = is_anchor_BGCR.shape
        run_BGCR = is_anchor_BGCR.cumsum(-1)
        before_BG1 = self.offset_BGC[:, :, self.chunks, None]
        upto_BGC = run_BGCR[..., -1].cumsum(-1) + before_BG1
        self.offset_BGC[:, :, self.chunks + 1 : self.chunks + chunks + 1] = upto_BGC
        place_BGCR = run_BGCR + (upto_BGC - run_BGCR[..., -1] - 1)[..., None]
        unused = self.start_BGP.shape[-1] - 1  # rows that begin no run go to this last slot
        place_BGS = torch.where(is_anchor_BGCR, place_BGCR, unused).flatten(2)
        end = begin + chunks * rows
        row_S = torch.arange(begin, end + 1, dtype=torch.int32, device=is_anchor_BGCR.device)
        self.start_BGP.scatter_(2, place_BGS, row_S[:-1].expand(batch, heads, -1))
        self.start_BGP.scatter_(2, upto_BGC[..., -1:], row_S[-1:].expand(batch, heads, -1))


def packed_chunks(first_block: int, query_blocks: int, critical: int, chunk: int) -> list[int]:
    """Return, for each query block, how many pack chunks end at least `critical` tokens before it."""
    return [max(0, (first_block + n) * BLOCK - critical) // chunk for n in range(query_blocks)]
