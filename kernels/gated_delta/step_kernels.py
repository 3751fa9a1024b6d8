"""The kernels of `step`. Shape suffixes are those of `states` and `step`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from deltafront.kernels.gated_delta.parameters import DeltaParameters
from deltafront.kernels.gated_delta.states import StepStates
from deltafront.kernels.launches import Launcher, cdiv, next_power_of_2

_CHANNELS = 256
"""Channels of a row that one program convolves."""
_NUMBERS = 4096
"""About as many numbers of a state does one program hold."""
EPS = tl.constexpr(1e-6)


@triton.jit
def step_convolve_kernel(
    x_ptr, weight_ptr, conv_ptr, slots_ptr, out_ptr, x_stride, conv_stride,
    CHANNELS: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve BLOCK channels of one row, and move their state on."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    state = conv_ptr + tl.load(slots_ptr + row) * conv_stride + channel
    weights = weight_ptr + channel * INPUTS
    newest = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0.0)
    weight = tl.load(weights + INPUTS - 1, mask=inside, other=0.0).to(tl.float32)
    total = newest.to(tl.float32) * weight
    for place in tl.static_range(INPUTS - 1):
        x = tl.load(state + place * CHANNELS, mask=inside, other=0.0)
        weight = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
        total += x.to(tl.float32) * weight
        if place > 0:
            tl.store(state + (place - 1) * CHANNELS, x, mask=inside)
    tl.store(state + (INPUTS - 2) * CHANNELS, newest, mask=inside)
    out = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + row * CHANNELS + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def step_delta_kernel(
    qkv_ptr, ba_ptr, decay_ptr, bias_ptr, recurrent_ptr, slots_ptr, out_ptr, ba_stride, recurrent_stride,
    scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK columns of one head's state in one slot, and compute as many channels of its output."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key = tl.arange(0, KEYS)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key = key < KEY_DIM
    is_column = column < DIM
    qkv = qkv_ptr + row * (2 * GROUPS * KEY_DIM + HEADS * DIM)
    own = qkv + (head // (HEADS // GROUPS)) * KEY_DIM + key
    q = tl.load(own, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(own + GROUPS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(qkv + 2 * GROUPS * KEY_DIM + head * DIM + column, mask=is_column, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    beta = tl.sigmoid(tl.load(ba_ptr + row * ba_stride + head).to(tl.float32))
    a = tl.load(ba_ptr + row * ba_stride + HEADS + head).to(tl.float32) + tl.load(bias_ptr + head)
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    decay = tl.exp(tl.load(decay_ptr + head) * softplus)
    slot = tl.load(slots_ptr + row)
    place = slot * recurrent_stride + (head * KEY_DIM + key[:, None]) * DIM + column[None, :]
    inside = is_key[:, None] & is_column[None, :]
    state = tl.load(recurrent_ptr + place, mask=inside, other=0.0) * decay
    u = beta * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * u[None, :]
    tl.store(recurrent_ptr + place, state, mask=inside)
    out = tl.sum(state * q[:, None], 0)
    tl.store(out_ptr + (row * HEADS + head) * DIM + column, out.to(out_ptr.dtype.element_ty), mask=is_column)


_step_convolve, _step_delta = Launcher(step_convolve_kernel), Launcher(step_delta_kernel)


def kernel_step_convolve(x_RE: torch.Tensor, parameters: DeltaParameters, rows: StepStates) -> torch.Tensor:
    count, channels = x_RE.shape
    out_RE = torch.empty((count, channels), dtype=x_RE.dtype, device=x_RE.device)
    block = min(_CHANNELS, next_power_of_2(channels))
    _step_convolve[(count, cdiv(channels, block))](
        x_RE,
        parameters.conv_EX,
        rows.states.conv_SWE,
        rows.slots_R,
        out_RE,
        x_RE.stride(0),
        rows.states.conv_SWE.stride(0),
        CHANNELS=channels,
        INPUTS=parameters.conv_EX.shape[1],
        BLOCK=block,
        num_warps=4,
    )
    return out_RE


def kernel_step_delta_rule(
    qkv_RE: torch.Tensor, ba_RJ: torch.Tensor, parameters: DeltaParameters, rows: StepStates
) -> torch.Tensor:
    _slots, heads, key_dim, dim = rows.states.recurrent_SHKD.shape
    out_RHD = torch.empty((len(qkv_RE), heads, dim), dtype=qkv_RE.dtype, device=qkv_RE.device)
    keys = next_power_of_2(key_dim)
    block = max(1, min(_NUMBERS // keys, next_power_of_2(dim)))
    _step_delta[(len(qkv_RE), heads, cdiv(dim, block))](
        qkv_RE,
        ba_RJ,
        parameters.decay_H,
        parameters.bias_H,
        rows.states.recurrent_SHKD,
        rows.slots_R,
        out_RHD,
        ba_RJ.stride(0),
        rows.states.recurrent_SHKD.stride(0),
        key_dim**-0.5,
        HEADS=heads,
        GROUPS=parameters.key_heads,
        KEY_DIM=key_dim,
        DIM=dim,
        KEYS=keys,
        BLOCK=block,
        num_warps=4,
    )
    return out_RHD
