"""Rows to e4m3 on the GPU: one program a row, which stays in registers. Shape suffixes as in `fp8.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launches import Launcher, next_power_of_2
from .fp8 import LARGEST, SMALLEST, Fp8Rows, empty_rows

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST)


def row_warps(block: int) -> int:
    """Warps of a program that holds a row of `block` numbers: 32 a thread."""
    return min(32, max(1, block // 1024))


@triton.jit
def store_fp8_row(x, values_ptr, scale_ptr, row, column, inside, COLUMNS: tl.constexpr):
    """One row of float32, zero where not inside."""
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
    """See `fp8.quantise_rows`."""
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


_TYPES = {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}

COMPILE_CASES = [(quantise_kernel, _TYPES, {"COLUMNS": 4096, "BLOCK": 4096})]
"""What tests/kernels compiles for sm_90: function, types of its arguments, constants."""
