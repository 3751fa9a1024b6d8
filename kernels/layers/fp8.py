"""FP8 (e4m3) matrices with one scale per row, and their GEMM. Activations are quantised at every call,
weights once.

Shape suffixes: T rows (tokens), I input width, O output width.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from deltafront.kernels.interface import KernelInputError, runs_on_cpu
from deltafront.kernels.launches import Launcher, next_power_of_2
from deltafront.kernels.layers.rows import check_rows

LARGEST = 448.0
"""The largest number of e4m3."""
SMALLEST = 1e-12
"""Minimum of the magnitude that a row's scale is computed from."""


@dataclass(frozen=True)
class Fp8Rows:
    """Quantised rows: row t is values_TI[t] (e4m3) · scale_T1[t] (float32)."""

    values_TI: torch.Tensor
    scale_T1: torch.Tensor

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.values_TI.float() * self.scale_T1).to(dtype)


def quantise_rows(x_TI: torch.Tensor) -> Fp8Rows:
    """Scale each row by its largest magnitude and round to the nearest e4m3. A row with NaN or infinity
    becomes NaN. Raises KernelInputError."""
    check_rows("quantise_rows", x=x_TI)
    if runs_on_cpu(x_TI, "quantise_rows"):
        return cpu_quantise_rows(x_TI.float())
    return kernel_quantise_rows(x_TI)


def cpu_quantise_rows(x_TI: torch.Tensor) -> Fp8Rows:
    largest_T1 = x_TI.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST)
    return Fp8Rows((x_TI * (LARGEST / largest_T1)).to(torch.float8_e4m3fn), largest_T1 / LARGEST)


def empty_rows(rows: int, width: int, device: torch.device) -> Fp8Rows:
    values_TI = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(values_TI, torch.empty((rows, 1), dtype=torch.float32, device=device))


def product(x: Fp8Rows, weight: Fp8Rows, bias_O: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Compute x · weightᵀ + bias in `dtype`. weight has one row per output channel.

    On a GPU this is `torch._scaled_mm` with one scale per row. It accumulates in less than float32.

    Raises:
        KernelInputError: The widths of x and weight differ, or `_scaled_mm` does not support them.
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


_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST)


def row_warps(block: int) -> int:
    """Return the number of warps at which each thread has 32 of `block` elements."""
    return min(32, max(1, block // 1024))


@triton.jit
def store_fp8_row(x, values_ptr, scale_ptr, row, column, inside, COLUMNS: tl.constexpr):
    """Quantise one float32 row and store it. x must be 0 outside the mask `inside`."""
    largest = tl.maximum(tl.max(tl.abs(x), 0), _SMALLEST)
    values = (x * (_LARGEST / largest)).to(tl.float8e4nv)
    tl.store(values_ptr + row * COLUMNS + column, values, mask=inside)
    tl.store(scale_ptr + row, largest / _LARGEST)


@triton.jit
def quantise_kernel(x_ptr, values_ptr, scale_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = tl.load(x_ptr + row * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
    store_fp8_row(x, values_ptr, scale_ptr, row, column, inside, COLUMNS)


_quantise = Launcher(quantise_kernel)


def kernel_quantise_rows(x_TI: torch.Tensor) -> Fp8Rows:
    rows, width = x_TI.shape
    made = empty_rows(rows, width, x_TI.device)
    block = next_power_of_2(width)
    _quantise[(rows,)](
        x_TI.contiguous(),
        made.values_TI,
        made.scale_T1,
        COLUMNS=width,
        BLOCK=block,
        num_warps=row_warps(block),
    )
    return made
