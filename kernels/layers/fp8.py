"""Rows of 8-bit numbers with one factor each, and their product.

Activations are rows of tokens, quantised as they come; weights are rows of output channels, quantised once.

Shape suffixes: T rows (tokens), I input width, O output width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..interface import KernelInputError, runs_on_cpu
from .rows import check_rows

LARGEST = 448.0
"""The largest number of e4m3."""
SMALLEST = 1e-12
"""What counts as the largest magnitude of a row that has none, so that its factor is a number."""


@dataclass(frozen=True)
class Fp8Rows:
    """Row t stands for values_TI[t] · scale_T1[t]; e4m3 and float32."""

    values_TI: torch.Tensor
    scale_T1: torch.Tensor

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.values_TI.float() * self.scale_T1).to(dtype)


def quantise_rows(x_TI: torch.Tensor) -> Fp8Rows:
    """Each row over its largest magnitude, rounded to the nearest e4m3.

    A row that holds NaN or an infinity becomes one that holds NaN. Raises KernelInputError unless x is a
    matrix with contiguous rows.
    """
    check_rows("quantise_rows", x=x_TI)
    if runs_on_cpu(x_TI, "quantise_rows"):
        return cpu_quantise_rows(x_TI.float())
    from .fp8_kernel import kernel_quantise_rows

    return kernel_quantise_rows(x_TI)


def cpu_quantise_rows(x_TI: torch.Tensor) -> Fp8Rows:
    """Of float32."""
    largest_T1 = x_TI.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST)
    return Fp8Rows((x_TI * (LARGEST / largest_T1)).to(torch.float8_e4m3fn), largest_T1 / LARGEST)


def empty_rows(rows: int, width: int, device: torch.device) -> Fp8Rows:
    values_TI = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(values_TI, torch.empty((rows, 1), dtype=torch.float32, device=device))


def product(x: Fp8Rows, weight: Fp8Rows, bias_O: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x · weightᵀ + bias in `dtype`, weight holding one row for each output channel.

    On a GPU by its 8-bit matrix unit (`torch._scaled_mm` with row-wise factors), which adds up in less than
    float32. Raises KernelInputError for widths that it does not take.
    """
    rows, width = weight.values_TI.shape
    if x.values_TI.shape[1] != width:
        raise KernelInputError(f"fp8 product: rows of {x.values_TI.shape[1]} and weights of {width}")
    if runs_on_cpu(x.values_TI, "fp8 product"):
        bias = None if bias_O is None else bias_O.float()
        return F.linear(x.dequantised(torch.float32), weight.dequantised(torch.float32), bias).to(dtype)
    if rows % 16 or width % 16:
        raise KernelInputError(f"fp8 product: {width} → {rows} channels, both must be multiples of 16")
    out_TO: torch.Tensor = torch._scaled_mm(
        x.values_TI,
        weight.values_TI.t(),
        scale_a=x.scale_T1,
        scale_b=weight.scale_T1.t(),
        bias=bias_O,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return out_TO
