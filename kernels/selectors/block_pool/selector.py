"""Block means as a selector."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...interface import BLOCK, AttentionInput, Phase
from ...methods import Value
from ..rules.rule import Rule
from ..scored import ScoredSelector, SlabSums
from . import reference


class BlockPoolSelector(ScoredSelector):
    """Mean query against mean key of every tile. values: `tau`."""

    name = "block_pool"
    sampled = 1.0 / BLOCK**2

    def __init__(self, values: Mapping[str, Value], *, rule: Rule | None = None) -> None:
        super().__init__(values, rule)

    def reference_scores(self, x: AttentionInput, state: object, phase: Phase) -> torch.Tensor:
        with phase("scoring"):
            return reference.scores(x)

    def slab_sums(self, x: AttentionInput, state: object, phase: Phase) -> tuple[int, SlabSums]:
        from ..grouped_kernel import log_sums
        from ..rules.sums import Sums
        from . import kernel

        with phase("scoring"):
            packed = kernel.prepare(x)
        return 1, lambda first, blocks: Sums(log_sums(packed, first, blocks), first)
