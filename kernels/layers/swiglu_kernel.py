"""SiLU(gate) · up on the GPU: a piece of a row a program, or all of it where the row has one factor.

Shape suffixes as in `swiglu.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launches import Launcher, cdiv, next_power_of_2
from .fp8 import empty_rows
from .fp8_kernel import row_warps, store_fp8_row
from .norm import LinearInput

_PIECE = 2048


@triton.jit
def _active(gate_up_ptr, row, column, inside, COLUMNS: tl.constexpr):
    gate = tl.load(gate_up_ptr + row * (2 * COLUMNS) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * COLUMNS) + COLUMNS + column, mask=inside, other=0.0)
    return gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = _active(gate_up_ptr, row, column, inside, COLUMNS)
    tl.store(out_ptr + row * COLUMNS + column, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_fp8_kernel(gate_up_ptr, values_ptr, scale_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = _active(gate_up_ptr, row, column, inside, COLUMNS)
    store_fp8_row(x, values_ptr, scale_ptr, row, column, inside, COLUMNS)


_activate, _activate_fp8 = Launcher(swiglu_kernel), Launcher(swiglu_fp8_kernel)


def kernel_swiglu(gate_up_TJ: torch.Tensor, fp8: bool) -> LinearInput:
    """See `swiglu.swiglu`."""
    gate_up_TJ = gate_up_TJ.contiguous()
    rows, width = gate_up_TJ.shape[0], gate_up_TJ.shape[1] // 2
    block = next_power_of_2(width)
    if fp8:
        made = empty_rows(rows, width, gate_up_TJ.device)
        _activate_fp8[(rows,)](
            gate_up_TJ,
            made.values_TI,
            made.scale_T1,
            COLUMNS=width,
            BLOCK=block,
            num_warps=row_warps(block),
        )
        return made
    out_TI = torch.empty((rows, width), dtype=gate_up_TJ.dtype, device=gate_up_TJ.device)
    piece = min(block, _PIECE)
    grid = (rows, cdiv(width, piece))
    _activate[grid](gate_up_TJ, out_TI, COLUMNS=width, BLOCK=piece, num_warps=4)
    return out_TI


COMPILE_CASES = [
    (swiglu_kernel, {"gate_up_ptr": "*bf16", "out_ptr": "*bf16"}, {"COLUMNS": 14336, "BLOCK": _PIECE}),
    *(
        (
            swiglu_fp8_kernel,
            {"gate_up_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scale_ptr": "*fp32"},
            {"COLUMNS": columns, "BLOCK": block},
            {"num_warps": row_warps(block)},
        )
        for columns, block in ((14336, 16384), (28672, 32768))
    ),
]
"""What tests/kernels compiles for sm_90: function, types of its arguments, constants, options."""
