"""Linear layers: all GEMMs with weights in decoder and output head. To add a weight format, change this file
and `stack_weights`.

Shape suffixes also: I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from deltafront.kernels.layers.fp8 import Fp8Rows, product, quantise_rows
from deltafront.kernels.layers.linear import compile_gemms, linear, swiglu_linear
from deltafront.kernels.layers.norm import LinearInput
from deltafront.kernels.layers.swiglu import geglu, squared_relu, swiglu

Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Linear:
    """Computes x_TI · weight_OIᵀ + bias_O, in the weight's dtype."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None = None
    quantised: ClassVar[bool] = False
    """True if inputs should be quantised to e4m3."""

    @property
    def stored(self) -> LinearInput:
        return self.weight_OI

    def __call__(self, x_TI: LinearInput) -> torch.Tensor:
        return linear(_plain(x_TI), self.weight_OI, self.bias_O)

    def gated(self, x_TI: LinearInput) -> LinearInput:
        """Return SiLU(gate) · up, in the input format of the next linear layer."""
        return swiglu_linear(_plain(x_TI), self.weight_OI, self.bias_O)

    def gelu_gated(self, x_TI: LinearInput) -> LinearInput:
        """Return GELU(gate) · up; same output format as `gated`."""
        return geglu(self(x_TI), fp8=False)

    def squared(self, x_TI: LinearInput) -> LinearInput:
        """Return ReLU(x · Wᵀ + b)²; same output format as `gated`."""
        return squared_relu(self(x_TI), fp8=False)

    def activated(self, x_TI: LinearInput, activation: Activation) -> LinearInput:
        """Return activation(x · Wᵀ + b), with the activation run by torch; same output format as `gated`."""
        return activation(self(x_TI))

    def compile(self) -> None:
        """Compile the GEMM kernels for large M, as in prefill."""
        compile_gemms(self.weight_OI)


@dataclass(frozen=True)
class Fp8Linear:
    """A linear layer with weights in e4m3 and a scale for each output channel. Its outputs have dtype
    `dtype`."""

    weight: Fp8Rows
    bias_O: torch.Tensor | None
    dtype: torch.dtype
    quantised: ClassVar[bool] = True

    @classmethod
    def of(cls, linear: Linear) -> Fp8Linear:
        return cls(quantise_rows(linear.weight_OI), linear.bias_O, linear.weight_OI.dtype)

    @property
    def weight_OI(self) -> torch.Tensor:
        return self.weight.dequantised(self.dtype)

    @property
    def stored(self) -> LinearInput:
        return self.weight

    def __call__(self, x_TI: LinearInput) -> torch.Tensor:
        rows_TI = x_TI if isinstance(x_TI, Fp8Rows) else quantise_rows(x_TI)
        return product(rows_TI, self.weight, self.bias_O, self.dtype)

    def gated(self, x_TI: LinearInput) -> LinearInput:
        return swiglu(self(x_TI), fp8=True)

    def gelu_gated(self, x_TI: LinearInput) -> LinearInput:
        return geglu(self(x_TI), fp8=True)

    def squared(self, x_TI: LinearInput) -> LinearInput:
        return squared_relu(self(x_TI), fp8=True)

    def activated(self, x_TI: LinearInput, activation: Activation) -> LinearInput:
        return quantise_rows(activation(self(x_TI)))

    def compile(self) -> None:
        """Do nothing: the same kernels serve every M."""


def _plain(x_TI: LinearInput) -> torch.Tensor:
    if isinstance(x_TI, Fp8Rows):
        raise TypeError("a linear layer with plain weights takes no quantised rows")
    return x_TI
