"""A linear layer. Every matrix product with weights in the decoder is one of these, the head included.

So another way to hold and multiply weights (fewer bits, a fused kernel) is a change to this file, and to
what `weights.py` makes of what it reads.

Shape suffixes: T tokens, I input width, O output width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Linear:
    """x_TI -> x · weightᵀ + bias, in the weight's dtype."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None = None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TI, self.weight_OI, self.bias_O)
