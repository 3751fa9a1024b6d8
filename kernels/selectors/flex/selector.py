"""FlexPrefill as a selector; a baseline, plain torch on every device."""

from __future__ import annotations

from collections.abc import Mapping

from ...interface import AttentionInput, KernelInputError, Phase, StateSpec, TileMask
from ...methods import Value
from ..lines import mask_of, require_whole_prompt
from . import reference


class FlexSelector:
    """FlexPrefill (Lai et al. 2025), Algorithms 1-4; whole prompt only. values: `gamma_flex`, `tau_flex`.

    sampled is 0: only the prompt's last rows and the block means are scored.
    """

    sampled = 0.0

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.gamma, self.tau = float(values["gamma_flex"]), float(values["tau_flex"])
        if not 0 < self.gamma <= 1 or not 0 <= self.tau <= 1:
            raise KernelInputError(f"gamma_flex {self.gamma} and tau_flex {self.tau} must be within 0 .. 1")

    def new_state(self, spec: StateSpec) -> None:
        return None

    def select(self, x: AttentionInput, state: object, phase: Phase) -> TileMask:
        require_whole_prompt(x, "flex")
        with phase("scoring"):
            keep_BHNM = reference.keep(x, self.gamma, self.tau)
        with phase("selection"):
            return mask_of(keep_BHNM)
