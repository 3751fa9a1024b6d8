"""The block-sparse executor: the reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...interface import AttentionInput, Phase, StateSpec, TileMask
from ...methods import Value
from ..common import check_mask, runs_on_cpu
from . import reference


class BlockSparseExecutor:
    """Attention over the tiles a selector kept."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        del values  # takes no options of its own

    def new_state(self, spec: StateSpec) -> None:
        del spec

    def attend(self, x: AttentionInput, mask: TileMask | None, state: None, phase: Phase) -> torch.Tensor:
        del state
        kept = check_mask(x, mask, "block_sparse")
        with phase("attention"):
            if runs_on_cpu(x, "block_sparse"):
                return reference.attend(x, kept)
            from . import kernel

            return kernel.attend(x, kept)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: None) -> torch.Tensor:
        del state
        return check_mask(x, mask, "block_sparse").count_BHN.sum(dtype=torch.float64)
