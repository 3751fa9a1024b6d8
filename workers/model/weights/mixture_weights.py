from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ....kernels.experts.mixture import compile_mixture, mixture
from ....kernels.experts.routing import Router
from ..directory.mixture_config import MixtureConfig
from .projections import Fp8Linear, Linear


@dataclass(frozen=True)
class MixtureWeights:
    """A layer's experts. Suffixes: E experts.

    Args:
        router_EC: In the model's dtype in any case: a rounded router would choose other experts.
        gate_up, down: All experts' matrices, one below the other; each gate is followed by its up.
    """

    config: MixtureConfig
    input_norm_C: torch.Tensor | None
    router_EC: torch.Tensor
    gate_up: Linear | Fp8Linear
    down: Linear | Fp8Linear
    output_norm_C: torch.Tensor | None = None

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        logits_TE = F.linear(x_TC, self.router_EC)
        gate_up, down = self.gate_up.stored, self.down.stored
        return mixture(x_TC, logits_TE, gate_up, down, self._router)

    def compile(self) -> None:
        """Compile kernels for all numbers of tokens."""
        config, dtype = self.config, self.router_EC.dtype
        gate_up, down = self.gate_up.stored, self.down.stored
        compile_mixture(config.experts, gate_up, down, self._router, dtype)

    @property
    def _router(self) -> Router:
        return Router(per_token=self.config.per_token, normed=self.config.normed)
