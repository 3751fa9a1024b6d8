"""Runs chunks of several prompts as one batch.

All rows share the GEMMs. Each chunk attends to its own prompt. A chunk that fails leaves the others alone.
"""

import itertools
from collections.abc import Callable, Sequence

import torch

from deltafront.kernels.gated_delta.states import RowStates
from deltafront.kernels.layers.rope import KVRows
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.prefill.stage.chunk import ChunkAttention, ChunkWork

Failed = Callable[[ChunkWork, Exception], None]


class BatchAttention:
    """Computes the attention of a batch's chunks (`LayerAttention`).

    Args:
        chunks: At least one, in the order of their rows. Chunks of a model whose layers have states run
            alone.
        errors: The errors that end one request only. An error of a chunk that runs alone is raised.
        failed: Called with a chunk of several and its error. Its rows go on, with zeros as attention.

    Attributes:
        rows: Each chunk's number of rows after the last layer.
        needed_T: As in `LayerAttention`.
    """

    def __init__(
        self,
        chunks: Sequence[ChunkAttention],
        cache: PagedKVCache,
        errors: tuple[type[Exception], ...],
        failed: Failed,
    ) -> None:
        self._chunks, self._cache = chunks, cache
        self._errors, self._failed = errors, failed
        self._dead: set[ChunkAttention] = set()
        self.needed_T: torch.Tensor | None = None
        self.rows = [chunk.tokens for chunk in chunks]
        self._alone = chunks[0] if len(chunks) == 1 else None
        if self._alone is None:
            self._rows_T = torch.cat([chunk.rows_T for chunk in chunks])

    def kv_rows(self, layer: int) -> KVRows:
        if self._alone is not None:
            return self._alone.kv_rows(layer)
        return self._cache.kv_rows(layer, self._rows_T)

    def row_states(self, layer: int) -> RowStates:
        assert self._alone is not None, "chunks of models with states run alone"
        return self._alone.row_states(layer)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor | None:
        if self._alone is not None:
            out_THD = self._alone.attend(layer, q_THD)
            self.rows = self.rows if out_THD is None else [len(out_THD)]
            return out_THD
        parts = torch.split(q_THD, [chunk.tokens for chunk in self._chunks])
        outs = [self._attended(chunk, layer, part) for chunk, part in zip(self._chunks, parts, strict=True)]
        found = [out_THD for out_THD in outs if out_THD is not None]
        if not found:
            return None
        self.rows = [0 if out_THD is None else len(out_THD) for out_THD in outs]
        if sum(self.rows) < len(q_THD):
            ends = itertools.accumulate(chunk.tokens for chunk in self._chunks)
            kept = [
                torch.arange(end - rows, end, device=q_THD.device)
                for end, rows in zip(ends, self.rows, strict=True)
            ]
            self.needed_T = torch.cat(kept)
        return torch.cat(found)

    def _attended(self, chunk: ChunkAttention, layer: int, q_THD: torch.Tensor) -> torch.Tensor | None:
        if chunk not in self._dead:
            try:
                chunk.check_wanted()
                return chunk.attend(layer, q_THD)
            except self._errors as error:
                self._dead.add(chunk)
                self._failed(chunk.work, error)
        return torch.zeros_like(q_THD)
