"""`few_rows.py` on the GPU: a program takes some output channels and streams their weights past the rows.

Shape suffixes as in `few_rows.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..interface import KernelInputError
from .few_rows import MOST_ROWS
from .fp8 import Fp8Rows

CHANNELS, STEP = 32, 256
"""Output channels of a program, and what of their rows it takes at a time."""


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights are the left side of the product: it is the one that has many rows."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, STEP)
    exists = channel < OUTPUTS
    weights = weight_ptr + channel.to(tl.int64)[:, None] * WIDTH + lane[None, :]
    inputs = x_ptr + row[None, :] * WIDTH + lane[:, None]
    total = tl.zeros((CHANNELS, ROWS), tl.float32)
    for _ in range(0, WIDTH, STEP):
        weight = tl.load(weights, mask=exists[:, None], other=0.0)
        x = tl.load(inputs, mask=row[None, :] < rows, other=0.0)
        total = tl.dot(weight.to(x.dtype), x, total, input_precision=PRECISION)
        weights += STEP
        inputs += STEP
    if SCALED:
        total *= tl.load(scale_ptr + channel, mask=exists, other=0.0)[:, None]
    if BIASED:
        total += tl.load(bias_ptr + channel, mask=exists, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + row[None, :] * OUTPUTS + channel[:, None]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (row[None, :] < rows))


def step_of(width: int, most: int) -> int:
    """The largest power of two, at most `most`, that divides a row."""
    return min(most, width & -width)


def kernel_product_of_few(
    x_TI: torch.Tensor, weight: torch.Tensor | Fp8Rows, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """See `few_rows.product_of_few`. Raises KernelInputError for rows that are no multiple of 16 long."""
    weight_OI = weight.values_TI if isinstance(weight, Fp8Rows) else weight
    outputs, width = weight_OI.shape
    if width % 16:
        raise KernelInputError(f"product_of_few: rows of {width}, must be a multiple of 16")
    out_TO = torch.empty((x_TI.shape[0], outputs), dtype=x_TI.dtype, device=x_TI.device)
    few_rows_kernel[(triton.cdiv(outputs, CHANNELS),)](
        x_TI.contiguous(),
        weight_OI,
        weight.scale_T1 if isinstance(weight, Fp8Rows) else weight_OI,
        weight_OI if bias_O is None else bias_O,
        out_TO,
        x_TI.shape[0],
        OUTPUTS=outputs,
        WIDTH=width,
        SCALED=isinstance(weight, Fp8Rows),
        BIASED=bias_O is not None,
        ROWS=MOST_ROWS,
        CHANNELS=CHANNELS,
        STEP=step_of(width, STEP),
        PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=4,
    )
    return out_TO


_TYPES = {
    **dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "*bf16"),
    "scale_ptr": "*fp32",
    "rows": "i32",
}
_SIZES = {"OUTPUTS": 4096, "WIDTH": 14336, "BIASED": False, "ROWS": MOST_ROWS, "CHANNELS": CHANNELS,
          "STEP": STEP, "PRECISION": "tf32"}  # fmt: skip

COMPILE_CASES = [
    (few_rows_kernel, _TYPES, {**_SIZES, "SCALED": False}, {"num_stages": 4}),
    (few_rows_kernel, {**_TYPES, "weight_ptr": "*fp8e4nv"}, {**_SIZES, "SCALED": True}, {"num_stages": 4}),
]
"""What tests/kernels compiles for sm_90: function, types of its arguments, constants, options."""
