"""The gated norm at the end of a gated delta network.

Shape suffixes: T rows, H heads, D channels of a head.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from deltafront.kernels.interface import KernelInputError, runs_on_cpu
from deltafront.kernels.launches import Launcher, next_power_of_2


def gated_norm(x_THD: torch.Tensor, z_THD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply RMSNorm to each head, then multiply by SiLU(z), in float32. Returns a tensor in x's dtype.

    Args:
        z_THD: The heads of a row are side by side. Rows may be apart.
    """
    if z_THD.shape != x_THD.shape or z_THD.stride()[1:] != (x_THD.shape[2], 1) or not x_THD.is_contiguous():
        raise KernelInputError(f"gated_norm: z {tuple(z_THD.shape)} for x {tuple(x_THD.shape)}")
    form = cpu_gated_norm if runs_on_cpu(x_THD, "gated_norm") else kernel_gated_norm
    return form(x_THD, z_THD, weight_D, eps)


def cpu_gated_norm(
    x_THD: torch.Tensor, z_THD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    normed_THD = F.rms_norm(x_THD.float(), weight_D.shape, weight_D.float(), eps)
    return (normed_THD * F.silu(z_THD.float())).to(x_THD.dtype)


@triton.jit
def gated_norm_kernel(
    x_ptr, z_ptr, weight_ptr, out_ptr, z_stride, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (channel < DIM)
    place = head * DIM + channel
    x = tl.load(x_ptr + row * (HEADS * DIM) + place, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + place, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    out = x * factor * weight * (z / (1.0 + tl.exp(-z)))
    tl.store(out_ptr + row * (HEADS * DIM) + place, out.to(out_ptr.dtype.element_ty), mask=inside)


_gated_norm = Launcher(gated_norm_kernel)
_NUMBERS = 2048
"""About as many numbers of a row does one program norm."""


def kernel_gated_norm(
    x_THD: torch.Tensor, z_THD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    rows, heads, dim = x_THD.shape
    out_THD = torch.empty_like(x_THD)
    block = next_power_of_2(dim)
    together = max(1, min(_NUMBERS // block, next_power_of_2(heads)))
    _gated_norm[(rows, -(-heads // together))](
        x_THD,
        z_THD,
        weight_D,
        out_THD,
        z_THD.stride(0),
        eps,
        HEADS=heads,
        DIM=dim,
        BLOCK_HEADS=together,
        BLOCK=block,
        num_warps=4,
    )
    return out_THD
