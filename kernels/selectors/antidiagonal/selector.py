"""XAttention's scores as a selector."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...interface import AttentionInput, KernelInputError, Phase, StateSpec, TileMask
from ...methods import Value
from ..rules import reference as rules
from ..rules.rule import Rule
from . import reference


class AntidiagonalSelector:
    """XAttention (Xu et al. 2025), sections 2.1-2.2.

    values: `stride` (4, 8 or 16) and `tau`. `rule` replaces the cumulative rule, for instance by one with a
    calibrated threshold per head: `Rule("cumulative", tau_H)`.
    """

    def __init__(self, values: Mapping[str, Value], *, rule: Rule | None = None) -> None:
        self.stride = int(values["stride"])
        if self.stride not in (4, 8, 16):
            raise KernelInputError(f"stride {self.stride} is not 4, 8 or 16")
        self.rule = rule or Rule("cumulative", float(values["tau"]))
        self.sampled = 1.0 / self.stride

    def new_state(self, spec: StateSpec) -> None:
        return None

    def scores(self, x: AttentionInput, state: object, phase: Phase) -> torch.Tensor:
        """float32 score_BHNM, for measuring the estimate itself."""
        with phase("scoring"):
            return reference.scores(x, self.stride)

    def select(self, x: AttentionInput, state: object, phase: Phase) -> TileMask:
        x.require_aligned("antidiagonal")
        score_BHNM = self.scores(x, state, phase)
        with phase("selection"):
            return rules.select(score_BHNM, self.rule, x.first_block)
