from dataclasses import dataclass

import torch
import torch.nn.functional as F

from deltafront.kernels.experts.gemm import ExpertOptions
from deltafront.kernels.experts.mixture import compile_mixture, mixture
from deltafront.kernels.experts.routing import Router
from deltafront.workers.model.directory.layer_config import MixtureConfig
from deltafront.workers.model.weights.projections import Fp8Linear, Linear


@dataclass(frozen=True)
class MixtureWeights:
    """A layer's experts and their router. Suffixes: E experts.

    Args:
        router_EC: Never quantised, since a rounded router would choose other experts; float32 if there is a
            bias_E.
        gate_up, down: The matrices of all experts, concatenated by rows: gate, up, gate, up, …
        bias_E: Added to the probabilities when experts are chosen, float32.
        shared_gate_up, shared_down: The matrices of the shared expert.
        shared_gate_1C: The shared expert's output is multiplied by the sigmoid of x · shared_gate_1Cᵀ. None:
            it is not.
        router_bias_E: Added to the router's logits.
        clamped: True if the activation is gpt-oss's.
    """

    config: MixtureConfig
    input_norm_C: torch.Tensor | None
    router_EC: torch.Tensor
    gate_up: Linear | Fp8Linear
    down: Linear | Fp8Linear
    output_norm_C: torch.Tensor | None = None
    bias_E: torch.Tensor | None = None
    shared_gate_up: Linear | Fp8Linear | None = None
    shared_down: Linear | Fp8Linear | None = None
    shared_gate_1C: torch.Tensor | None = None
    router_bias_E: torch.Tensor | None = None
    clamped: bool = False

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        logits_TE = F.linear(x_TC.to(self.router_EC.dtype), self.router_EC, self.router_bias_E)
        if self.config.biased_softmax:
            logits_TE = logits_TE.softmax(-1).logit()  # the router applies a sigmoid: softmax scores again
        gate_up, down = self.gate_up.stored, self.down.stored
        sum_TC = mixture(x_TC, logits_TE, gate_up, down, self._router, options=self._options)
        if self.shared_gate_up is None or self.shared_down is None:
            return sum_TC
        shared_TC = self.shared_down(self.shared_gate_up.gated(x_TC))
        if self.shared_gate_1C is not None:
            shared_TC = shared_TC * F.linear(x_TC, self.shared_gate_1C).sigmoid()
        return sum_TC.add_(shared_TC)

    def compile(self) -> None:
        """Compile the kernels for any number of tokens."""
        gate_up, down = self.gate_up.stored, self.down.stored
        compile_mixture(self.config.experts, gate_up, down, self._router, self._dtype, self._options)
        for shared in (self.shared_gate_up, self.shared_down):
            if shared is not None:
                shared.compile()

    @property
    def _router(self) -> Router:
        config = self.config
        return Router(
            per_token=config.per_token,
            normed=config.normed,
            bias_E=self.bias_E,
            groups=config.groups,
            chosen_groups=config.chosen_groups,
            scale=config.scale,
        )

    @property
    def _options(self) -> ExpertOptions:
        return ExpertOptions(self.gate_up.bias_O, self.down.bias_O, self.clamped)

    @property
    def _dtype(self) -> torch.dtype:
        return self.gate_up.dtype if isinstance(self.gate_up, Fp8Linear) else self.gate_up.weight_OI.dtype
