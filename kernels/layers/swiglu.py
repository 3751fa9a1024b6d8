"""Activation functions between an MLP's two GEMMs. Shape suffixes: T tokens, I intermediate size, J = 2 I."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from deltafront.kernels.interface import KernelInputError, runs_on_cpu
from deltafront.kernels.launches import Launcher, cdiv, next_power_of_2
from deltafront.kernels.layers.fp8 import Fp8Rows, cpu_quantise_rows, empty_rows, row_warps, store_fp8_row
from deltafront.kernels.layers.norm import LinearInput
from deltafront.kernels.layers.rows import check_rows


def swiglu(gate_up_TJ: torch.Tensor, fp8: bool) -> LinearInput:
    """Compute SiLU(gate) · up (Shazeer 2020, equation 6) from a row's two halves: [T, 2 I] → [T, I].

    Args:
        fp8: Return rows of e4m3.

    Raises:
        KernelInputError: Rows are not contiguous, or their width is odd.
    """
    return _gated("swiglu", gate_up_TJ, fp8, gelu=False)


def geglu(gate_up_TJ: torch.Tensor, fp8: bool) -> LinearInput:
    """Compute GELU(gate) · up (Shazeer 2020, equation 6) with the tanh form of GELU (Hendrycks and Gimpel
    2016, section 2). Same arguments and errors as `swiglu`."""
    return _gated("geglu", gate_up_TJ, fp8, gelu=True)


def _gated(name: str, gate_up_TJ: torch.Tensor, fp8: bool, gelu: bool) -> LinearInput:
    check_rows(name, gate_up=gate_up_TJ)
    if gate_up_TJ.shape[1] % 2:
        raise KernelInputError(f"{name}: rows of {gate_up_TJ.shape[1]} have no halves")
    if runs_on_cpu(gate_up_TJ, name):
        return cpu_swiglu(gate_up_TJ, fp8, gelu)
    return kernel_swiglu(gate_up_TJ, fp8, gelu)


def cpu_swiglu(gate_up_TJ: torch.Tensor, fp8: bool, gelu: bool = False) -> torch.Tensor | Fp8Rows:
    gate_TI, up_TI = (gate_up_TJ.float() if fp8 else gate_up_TJ).chunk(2, dim=-1)
    active_TI = (F.gelu(gate_TI, approximate="tanh") if gelu else F.silu(gate_TI)) * up_TI
    return cpu_quantise_rows(active_TI) if fp8 else active_TI


def squared_relu(x_TI: torch.Tensor, fp8: bool) -> LinearInput:
    """Compute ReLU(x)² (So et al. 2021, section 4.2).

    Args:
        fp8: Return rows of e4m3.

    Raises:
        KernelInputError: Rows are not contiguous.
    """
    check_rows("squared_relu", x=x_TI)
    if runs_on_cpu(x_TI, "squared_relu"):
        return cpu_squared_relu(x_TI, fp8)
    return kernel_squared_relu(x_TI, fp8)


def cpu_squared_relu(x_TI: torch.Tensor, fp8: bool) -> torch.Tensor | Fp8Rows:
    active_TI = F.relu(x_TI.float() if fp8 else x_TI).square()
    return cpu_quantise_rows(active_TI) if fp8 else active_TI


_PIECE = 2048


@triton.jit
def _active(gate_up_ptr, row, column, inside, COLUMNS: tl.constexpr, GELU: tl.constexpr):
    gate = tl.load(gate_up_ptr + row * (2 * COLUMNS) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * COLUMNS) + COLUMNS + column, mask=inside, other=0.0)
    steep = gate
    if GELU:  # (1 + tanh(z)) / 2 is the sigmoid of 2 z
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-steep)) * up.to(tl.float32)


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = _active(gate_up_ptr, row, column, inside, COLUMNS, GELU)
    tl.store(out_ptr + row * COLUMNS + column, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_fp8_kernel(
    gate_up_ptr, values_ptr, scale_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = _active(gate_up_ptr, row, column, inside, COLUMNS, GELU)
    store_fp8_row(x, values_ptr, scale_ptr, row, column, inside, COLUMNS)


@triton.jit
def squared_relu_kernel(x_ptr, out_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = tl.maximum(tl.load(x_ptr + row * COLUMNS + column, mask=inside, other=0.0).to(tl.float32), 0.0)
    tl.store(out_ptr + row * COLUMNS + column, (x * x).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def squared_relu_fp8_kernel(x_ptr, values_ptr, scale_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = tl.maximum(tl.load(x_ptr + row * COLUMNS + column, mask=inside, other=0.0).to(tl.float32), 0.0)
    store_fp8_row(x * x, values_ptr, scale_ptr, row, column, inside, COLUMNS)


_activate, _activate_fp8 = Launcher(swiglu_kernel), Launcher(swiglu_fp8_kernel)
_square, _square_fp8 = Launcher(squared_relu_kernel), Launcher(squared_relu_fp8_kernel)


def kernel_swiglu(gate_up_TJ: torch.Tensor, fp8: bool, gelu: bool = False) -> LinearInput:
    width, kernel = gate_up_TJ.shape[1] // 2, _activate_fp8 if fp8 else _activate
    return _launch(gate_up_TJ.contiguous(), width, kernel, fp8, GELU=gelu)


def kernel_squared_relu(x_TI: torch.Tensor, fp8: bool) -> LinearInput:
    return _launch(x_TI.contiguous(), x_TI.shape[1], _square_fp8 if fp8 else _square, fp8)


def _launch(x_TJ: torch.Tensor, width: int, kernel: Launcher, fp8: bool, **kind: bool) -> LinearInput:
    rows, block = x_TJ.shape[0], next_power_of_2(width)
    if fp8:
        made = empty_rows(rows, width, x_TJ.device)
        kernel[(rows,)](
            x_TJ,
            made.values_TI,
            made.scale_T1,
            COLUMNS=width,
            BLOCK=block,
            **kind,
            num_warps=row_warps(block),
        )
        return made
    out_TI = torch.empty((rows, width), dtype=x_TJ.dtype, device=x_TJ.device)
    piece = min(block, _PIECE)
    kernel[(rows, cdiv(width, piece))](x_TJ, out_TI, COLUMNS=width, BLOCK=piece, **kind, num_warps=4)
    return out_TI
