"""XAttention's scores as a selector."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...interface import BLOCK, AttentionInput, KernelInputError, Phase
from ...methods import Value
from ..rules.rule import Rule
from ..scored import ScoredSelector, SlabSums
from . import reference


class AntidiagonalSelector(ScoredSelector):
    """XAttention (Xu et al. 2025), sections 2.1-2.2. values: `stride` (4, 8 or 16) and `tau`."""

    name = "antidiagonal"

    def __init__(self, values: Mapping[str, Value], *, rule: Rule | None = None) -> None:
        super().__init__(values, rule)
        self.stride = int(values["stride"])
        if self.stride not in (4, 8, 16):
            raise KernelInputError(f"stride {self.stride} is not 4, 8 or 16")
        self.sampled = 1.0 / self.stride

    def reference_scores(self, x: AttentionInput, state: object, phase: Phase) -> torch.Tensor:
        with phase("scoring"):
            return reference.scores(x, self.stride)

    def slab_sums(self, x: AttentionInput, state: object, phase: Phase) -> tuple[int, SlabSums]:
        from ..grouped_kernel import log_sums
        from ..rules.sums import Sums
        from . import kernel

        with phase("scoring"):
            packed = kernel.prepare(x, self.stride)
        return BLOCK // self.stride, lambda first, blocks: Sums(log_sums(packed, first, blocks), first)
