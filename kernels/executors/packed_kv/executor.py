"""The Delta-KV executor: the reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...interface import BLOCK, AttentionInput, Phase, StateSpec, TileMask
from ...methods import Value
from ..common import runs_on_cpu
from . import reference
from .packing import PackedRuns, Runs, SimilarRuns

CHUNK = 512
"""Tokens in which runs are sought (DeltaAttention section 4.1); also the grain of the exact region."""


class PackedKVExecutor:
    """Delta-KV: far keys packed by runs, the `critical` tokens before each query block exact.

    Options: cos, counts, critical (see `methods.py`). runs replaces the similarity scan (ablations);
    mean_keys False packs a run's anchor instead of its mean.
    """

    def __init__(
        self, values: Mapping[str, Value], *, runs: Runs | None = None, mean_keys: bool = True
    ) -> None:
        self.runs = SimilarRuns(float(values["cos"])) if runs is None else runs
        self.critical = int(values["critical"])
        self._options: dict[str, Any] = {
            "chunk": CHUNK,
            "critical": self.critical,
            "counts": bool(values["counts"]),
            "mean_keys": mean_keys,
        }

    def new_state(self, spec: StateSpec) -> PackedRuns:
        return PackedRuns.empty(spec, CHUNK)

    def attend(
        self, x: AttentionInput, mask: TileMask | None, state: PackedRuns, phase: Phase
    ) -> torch.Tensor:
        del mask
        x.require_aligned("packed_kv")
        state.check(x, "packed_kv")
        with phase("anchors"):
            state.extend(x.k_BGSD, CHUNK, self.runs)
        with phase("attention"):
            if runs_on_cpu(x, "packed_kv"):
                return reference.attend(x, state, **self._options)
            from . import kernel

            return kernel.attend(x, state, **self._options)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: PackedRuns) -> torch.Tensor:
        """Packed rows count as 1/128 of a tile each, exact tiles as one."""
        del mask
        row_N = x.first_block + torch.arange(x.query_blocks, device=x.q_BHTD.device)
        chunks_N = (row_N * BLOCK - self.critical).clamp(min=0) // CHUNK
        exact_N = row_N + 1 - chunks_N * (CHUNK // BLOCK)
        packed_BGN = state.offset_BGC.index_select(2, chunks_N)
        batch, heads = x.q_BHTD.shape[:2]
        exact = exact_N.sum(dtype=torch.float64) * (batch * heads)
        return exact + packed_BGN.sum(dtype=torch.float64) * (x.group / BLOCK)
