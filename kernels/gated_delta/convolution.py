"""The causal convolution of a gated delta network over a sequence, with SiLU.

Channels are convolved separately: an output is the weighted sum of its channel's input in the same row and in
the W rows before (Gated DeltaNet, Yang et al. 2025, arXiv 2412.06464, section 3.4).

Shape suffixes are those of `states`, and: T rows, X = W + 1 weights of a channel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from deltafront.kernels.gated_delta.states import SequenceStates
from deltafront.kernels.interface import runs_on_cpu
from deltafront.kernels.launches import Launcher, cdiv, next_power_of_2


def convolve(x_TE: torch.Tensor, weight_EX: torch.Tensor, rows: SequenceStates) -> torch.Tensor:
    """Return SiLU of the convolution, [T, E], and write the convolution's states of all cuts."""
    before_WE = rows.states.conv_SWE[rows.first].clone()  # a cut may write to this slot
    form = cpu_convolve if runs_on_cpu(x_TE, "convolve") else kernel_convolve
    out_TE = form(x_TE, weight_EX, before_WE)
    for end, slot in rows.cuts:
        rows.states.conv_SWE[slot] = _last_inputs(x_TE[:end], before_WE)
    return out_TE


def _last_inputs(x_TE: torch.Tensor, before_WE: torch.Tensor) -> torch.Tensor:
    width, rows = len(before_WE), len(x_TE)
    return x_TE[rows - width :] if rows >= width else torch.cat([before_WE[rows:], x_TE])


def cpu_convolve(x_TE: torch.Tensor, weight_EX: torch.Tensor, before_WE: torch.Tensor) -> torch.Tensor:
    """Compute `convolve` in float32, without writing states.

    Args:
        before_WE: The inputs before the first row, oldest first.
    """
    inputs_SE = torch.cat([before_WE, x_TE]).float()
    sum_TE = torch.zeros(x_TE.shape)
    for first, weight_E in enumerate(weight_EX.float().T):
        sum_TE.addcmul_(inputs_SE[first : first + len(x_TE)], weight_E)
    return F.silu(sum_TE).to(x_TE.dtype)


_ROWS, _CHANNELS = 16, 128
"""Rows and channels of one program."""


@triton.jit(do_not_specialize=["tokens"])
def convolve_kernel(
    x_ptr, weight_ptr, before_ptr, out_ptr, tokens, x_stride,
    CHANNELS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve BLOCK channels of ROWS rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < tokens) & (channel < CHANNELS)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for place in tl.static_range(INPUTS):
        source = row + (place + 1 - INPUTS)
        x = tl.load(x_ptr + source * x_stride + channel, mask=inside & (source >= 0), other=0.0)
        older = before_ptr + (source + INPUTS - 1) * CHANNELS + channel
        x += tl.load(older, mask=inside & (source < 0), other=0.0)
        weight = tl.load(weight_ptr + channel * INPUTS + place, mask=channel < CHANNELS, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    out = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + row * CHANNELS + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


_convolve = Launcher(convolve_kernel)


def kernel_convolve(x_TE: torch.Tensor, weight_EX: torch.Tensor, before_WE: torch.Tensor) -> torch.Tensor:
    rows, channels = x_TE.shape
    out_TE = torch.empty((rows, channels), dtype=x_TE.dtype, device=x_TE.device)
    block = min(_CHANNELS, next_power_of_2(channels))
    _convolve[(cdiv(rows, _ROWS), cdiv(channels, block))](
        x_TE,
        weight_EX,
        before_WE,
        out_TE,
        rows,
        x_TE.stride(0),
        CHANNELS=channels,
        INPUTS=weight_EX.shape[1],
        ROWS=_ROWS,
        BLOCK=block,
        num_warps=4,
    )
    return out_TE
