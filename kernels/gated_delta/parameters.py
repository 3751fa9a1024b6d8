"""A gated delta network's parameters other than its projections, and the gates of its recurrence.

Shape suffixes are those of `states`, and: T rows, J = 2 H columns of beta and decay, X = W + 1 weights of a
channel.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class DeltaParameters:
    """The parameters of one layer.

    Args:
        conv_EX: The filter of each channel, the newest input last, in the rows' dtype.
        decay_H: -exp(A), float32. The logarithm of a row's decay is this times softplus(a + bias_H).
        bias_H: float32.
        norm_D: The weights of the gated norm, float32.
        key_heads: Value head h uses the query and key of head h // (H / key_heads).
    """

    conv_EX: torch.Tensor
    decay_H: torch.Tensor
    bias_H: torch.Tensor
    norm_D: torch.Tensor
    eps: float
    key_heads: int


@dataclass(frozen=True)
class Gates:
    """The gates of each row and value head, float32: the logarithm of its decay alpha, and beta."""

    decay_TH: torch.Tensor
    beta_TH: torch.Tensor

    @classmethod
    def of(cls, ba_TJ: torch.Tensor, parameters: DeltaParameters) -> "Gates":
        b_TH, a_TH = ba_TJ.float().chunk(2, dim=1)
        return cls(parameters.decay_H * F.softplus(a_TH + parameters.bias_H), b_TH.sigmoid())
