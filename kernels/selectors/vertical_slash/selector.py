"""MInference's vertical-slash pattern as a selector; a baseline, whole prompt only."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...interface import AttentionInput, KernelInputError
from ...methods import Value
from ..lines_selector import LineSelector
from . import reference


class VerticalSlashSelector(LineSelector):
    """MInference (Jiang et al. 2024), Algorithm 2; whole prompt only. values: `verticals`, `slashes`."""

    name = "vertical_slash"

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.verticals, self.slashes = int(values["verticals"]), int(values["slashes"])
        if self.verticals < 1 or self.slashes < 1:
            raise KernelInputError(f"{self.verticals} verticals, {self.slashes} slashes: at least 1 of each")

    def reference_keep(self, x: AttentionInput) -> torch.Tensor:
        return reference.keep(x, self.verticals, self.slashes)

    def kernel_keep(self, x: AttentionInput) -> torch.Tensor:
        from . import kernel

        return kernel.keep(x, self.verticals, self.slashes)
