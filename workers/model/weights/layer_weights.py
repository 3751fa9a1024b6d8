"""The weights of a layer's attention (or linear attention) and MLP, and norms and activations in torch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from deltafront.kernels.gated_delta.parameters import DeltaParameters
from deltafront.kernels.layers.fp8 import quantise_rows
from deltafront.kernels.layers.norm import LinearInput
from deltafront.workers.model.weights.projections import Activation, Fp8Linear, Linear

_ROWS = 1024
"""Rows that xIELU computes at once, to bound memory."""


@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm with weights and an optional bias (Ba et al. 2016), computed by torch."""

    weight_C: torch.Tensor
    bias_C: torch.Tensor | None

    def __call__(self, x_TC: torch.Tensor, eps: float, fp8: bool) -> LinearInput:
        normed_TC = F.layer_norm(x_TC, self.weight_C.shape, self.weight_C, self.bias_C, eps)
        return quantise_rows(normed_TC) if fp8 else normed_TC


Norm = torch.Tensor | LayerNorm
"""The norm before attention or an MLP: RMSNorm's weights, or a LayerNorm."""


def tanh_gelu(x_TI: torch.Tensor) -> torch.Tensor:
    return F.gelu(x_TI, approximate="tanh")


@dataclass(frozen=True)
class Xielu:
    """The activation xIELU (Huang and Schlag 2024, arXiv 2411.13010, section 3). Each layer has its own
    parameters, in float32."""

    alpha_p: torch.Tensor
    alpha_n: torch.Tensor
    beta: torch.Tensor
    eps: torch.Tensor

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        out_TI = torch.empty_like(x_TI)
        for x_RI, out_RI in zip(torch.split(x_TI, _ROWS), torch.split(out_TI, _ROWS), strict=True):
            out_RI.copy_(self._of(x_RI.float()))
        return out_TI

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        above = F.softplus(self.alpha_p) * x * x
        below = (torch.expm1(torch.minimum(x, self.eps)) - x) * (self.beta + F.softplus(self.alpha_n))
        return torch.where(x > 0, above, below) + self.beta * x


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of a layer's attention. input_norm and output_norm_C are None in families without these
    norms. The output of attention is multiplied by the sigmoid of `gate`, applied to attention's input; None:
    it is not. sink_H: each head's attention sink (`AttentionInput`).

    q_scale_D is for models with QK norm after RoPE. RoPE does not change a vector's length, so the kernel
    norms q and k before RoPE, with weights 1. The rotated q is multiplied by q_scale_D, the product of both
    norms' weights. This gives the same scores q · k.
    """

    input_norm: Norm | None
    qkv: Linear | Fp8Linear
    qk_norm_JD: torch.Tensor | None
    output: Linear | Fp8Linear
    output_norm_C: torch.Tensor | None = None
    q_scale_D: torch.Tensor | None = None
    gate: Linear | Fp8Linear | None = None
    sink_H: torch.Tensor | None = None


@dataclass(frozen=True)
class GatedDeltaWeights:
    """The weights of a layer's linear attention, a gated delta network (`kernels.gated_delta.layer`).

    Args:
        qkvz: The projection to queries, keys, values and the output gate z.
        ba_JC: The projection to beta and decay. Never quantised, since errors of decays add up over a
            sequence.
        delta: What follows these projections.
    """

    input_norm: Norm | None
    qkvz: Linear | Fp8Linear
    ba_JC: torch.Tensor
    delta: DeltaParameters
    output: Linear | Fp8Linear


@dataclass(frozen=True)
class MlpWeights:
    """The weights of a layer's MLP. Norms are as in AttentionWeights.

    Args:
        gate_up: Only the up projection, if the activation has no gate.
        activation: An activation that torch computes. None: a kernel computes `ModelConfig.activation`.
    """

    input_norm: Norm | None
    gate_up: Linear | Fp8Linear
    down: Linear | Fp8Linear
    output_norm_C: torch.Tensor | None = None
    activation: Activation | None = None
