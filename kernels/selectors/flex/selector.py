"""FlexPrefill as a selector; a baseline, whole prompt only."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...interface import AttentionInput, KernelInputError
from ...methods import Value
from ..lines_selector import LineSelector
from . import reference


class FlexSelector(LineSelector):
    """FlexPrefill (Lai et al. 2025), Algorithms 1-4; whole prompt only. values: `gamma_flex`, `tau_flex`."""

    name = "flex"

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.gamma, self.tau = float(values["gamma_flex"]), float(values["tau_flex"])
        if not 0 < self.gamma <= 1 or not 0 <= self.tau <= 1:
            raise KernelInputError(f"gamma_flex {self.gamma} and tau_flex {self.tau} must be within 0 .. 1")

    def reference_keep(self, x: AttentionInput) -> torch.Tensor:
        return reference.keep(x, self.gamma, self.tau)

    def kernel_keep(self, x: AttentionInput) -> torch.Tensor:
        from . import kernel

        return kernel.keep(x, self.gamma, self.tau)
