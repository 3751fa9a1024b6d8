"""Fused residual add and RMSNorm. Shape suffixes: T tokens, C hidden size."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from deltafront.kernels.interface import KernelInputError, runs_on_cpu
from deltafront.kernels.launches import Launcher, next_power_of_2
from deltafront.kernels.layers.fp8 import Fp8Rows, cpu_quantise_rows, empty_rows, row_warps, store_fp8_row
from deltafront.kernels.layers.rows import check_rows

LinearInput = torch.Tensor | Fp8Rows
"""Input of a linear layer: a 16-bit or 32-bit tensor, or FP8 rows."""


def add_norm(
    hidden_TC: torch.Tensor, update_TC: torch.Tensor | None, weight_C: torch.Tensor, eps: float, fp8: bool
) -> tuple[torch.Tensor, LinearInput]:
    """Add the update to hidden and apply RMSNorm to the sum (Zhang and Sennrich 2019, equation 4). Return the
    sum and its norm.

    The sum is rounded to hidden's dtype, then normed in float32. The inputs stay unchanged.

    Args:
        update_TC: None: add nothing.
        weight_C: In hidden's dtype or float32.
        fp8: Return the norm as rows of e4m3.

    Raises:
        KernelInputError: Shapes or dtypes differ.
    """
    given = {"hidden": hidden_TC} if update_TC is None else {"hidden": hidden_TC, "update": update_TC}
    check_rows("add_norm", **given)
    if weight_C.shape != hidden_TC.shape[1:]:
        raise KernelInputError(f"add_norm: weight {tuple(weight_C.shape)} of {hidden_TC.shape[1]} channels")
    if runs_on_cpu(hidden_TC, "add_norm"):
        return cpu_add_norm(hidden_TC, update_TC, weight_C, eps, fp8)
    return kernel_add_norm(hidden_TC, update_TC, weight_C, eps, fp8)


def cpu_add_norm(
    hidden_TC: torch.Tensor, update_TC: torch.Tensor | None, weight_C: torch.Tensor, eps: float, fp8: bool
) -> tuple[torch.Tensor, LinearInput]:
    sum_TC = hidden_TC if update_TC is None else hidden_TC + update_TC
    if not fp8 and weight_C.dtype == sum_TC.dtype:
        return sum_TC, F.rms_norm(sum_TC, weight_C.shape, weight_C, eps)
    normed_TC = F.rms_norm(sum_TC.float(), weight_C.shape, weight_C.float(), eps)
    return sum_TC, cpu_quantise_rows(normed_TC) if fp8 else normed_TC.to(sum_TC.dtype)


@triton.jit
def add_norm_kernel(
    hidden_ptr, update_ptr, weight_ptr, sum_ptr, normed_ptr, scale_ptr, eps,
    ADDS: tl.constexpr, FP8: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    place = row * COLUMNS + column
    x = tl.load(hidden_ptr + place, mask=inside, other=0.0)
    if ADDS:
        update = tl.load(update_ptr + place, mask=inside, other=0.0)
        x = (x.to(tl.float32) + update.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + place, x, mask=inside)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / COLUMNS + eps) * weight
    if FP8:
        store_fp8_row(normed, normed_ptr, scale_ptr, row, column, inside, COLUMNS)
    else:
        tl.store(normed_ptr + place, normed.to(normed_ptr.dtype.element_ty), mask=inside)


_add_norm = Launcher(add_norm_kernel)


def kernel_add_norm(
    hidden_TC: torch.Tensor, update_TC: torch.Tensor | None, weight_C: torch.Tensor, eps: float, fp8: bool
) -> tuple[torch.Tensor, LinearInput]:
    hidden_TC = hidden_TC.contiguous()
    rows, width = hidden_TC.shape
    sum_TC, update = hidden_TC, hidden_TC
    if update_TC is not None:
        sum_TC, update = torch.empty_like(hidden_TC), update_TC.contiguous()
    quantised = empty_rows(rows, width, hidden_TC.device) if fp8 else None
    normed_TC = torch.empty_like(hidden_TC) if quantised is None else quantised.values_TI
    block = next_power_of_2(width)
    _add_norm[(rows,)](
        hidden_TC,
        update,
        weight_C,
        sum_TC,
        normed_TC,
        normed_TC if quantised is None else quantised.scale_T1,
        eps,
        ADDS=update_TC is not None,
        FP8=fp8,
        COLUMNS=width,
        BLOCK=block,
        num_warps=row_warps(block),
    )
    return sum_TC, normed_TC if quantised is None else quantised
