"""MInference's vertical-slash pattern as a selector; a baseline, plain torch on every device."""

from __future__ import annotations

from collections.abc import Mapping

from ...interface import AttentionInput, KernelInputError, Phase, StateSpec, TileMask
from ...methods import Value
from ..lines import mask_of, require_whole_prompt
from . import reference


class VerticalSlashSelector:
    """MInference (Jiang et al. 2024), Algorithm 2; whole prompt only. values: `verticals`, `slashes`."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.verticals, self.slashes = int(values["verticals"]), int(values["slashes"])
        if self.verticals < 1 or self.slashes < 1:
            raise KernelInputError(f"{self.verticals} verticals, {self.slashes} slashes: at least 1 of each")

    def new_state(self, spec: StateSpec) -> None:
        return None

    def select(self, x: AttentionInput, state: object, phase: Phase) -> TileMask:
        require_whole_prompt(x, "vertical_slash")
        with phase("scoring"):
            keep_BHNM = reference.keep(x, self.verticals, self.slashes)
        with phase("selection"):
            return mask_of(keep_BHNM)
