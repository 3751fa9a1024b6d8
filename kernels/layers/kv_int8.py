"""The int8 KV cache. A row, the D channels of one KV head of one token, is stored as D integers and one
scale.

Channel d is (number[d] - 128) · scale, with numbers of 1 .. 255. A scale is one byte, five bits of exponent
and three of fraction: the upper bits of a float16, times 2^-6. A scale depends only on its row, so writing a
token never changes the tokens already in a page.

Shape suffixes: R rows of a layer's KV cache, G key/value heads, D head dimension, S tokens of a sequence.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deltafront.kernels.interface import KernelInputError, runs_on_cpu
from deltafront.kernels.launches import Launcher, cdiv, next_power_of_2

BYTES = torch.uint8
"""Dtype of numbers and scales."""
NOT_A_NUMBER = 255
"""Scale byte of a row with a NaN or with a magnitude above 121,920, whose scale would exceed float16."""
LEAST = 8
"""Byte of the smallest scale, 2^-20. Smaller rows are rounded to multiples of 2^-20."""

_LARGEST = 247
_TO_FLOAT32 = 106 << 3
"""A scale's byte plus this gives the upper bits of the scale as a float32."""
_ZERO = 1.5 * 2.0**23 + 128
"""Adding this to a small float leaves round(x) + 128 in its lowest byte."""


@dataclass(frozen=True)
class Scales:
    """Scales of k and v: uint8, in the shapes of k and v without the last dimension."""

    k: torch.Tensor
    v: torch.Tensor


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows. Each gets the smallest scale at which its largest magnitude fits. Ties round to even.

    Returns:
        Numbers (uint8, x's shape) and scales (uint8, without the last dimension).
    """
    x = x.float()
    least = (x.abs().amax(-1) * (1 / 127)).view(torch.int32)
    upper = (least.clamp_max(0x7F800000) + 0xFFFFF) >> 20  # clamped, because a large NaN would overflow
    byte = (upper - _TO_FLOAT32).clamp_min(LEAST)
    scale = ((byte + _TO_FLOAT32) << 20).view(torch.float32)[..., None]
    numbers = (x * (1 / scale) + _ZERO).view(torch.int32) & 0xFF
    return numbers.to(BYTES), torch.where(byte > _LARGEST, NOT_A_NUMBER, byte).to(BYTES)


def dequantise(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise numbers [..., D] with scales [...] to `dtype`, exactly in float16 and float32."""
    scale = (scales.int() << 7).to(torch.int16).view(torch.float16).float() * 2.0**-6
    return ((numbers.float() - 128) * scale[..., None]).to(dtype)


def check_quantised(name: str, numbers: torch.Tensor, scales: torch.Tensor) -> None:
    """Check that the shapes, dtypes and devices of numbers and scales match. Raises KernelInputError."""
    if numbers.dtype != BYTES or scales.dtype != BYTES or scales.shape != numbers.shape[:-1]:
        raise KernelInputError(
            f"{name}: an 8-bit KV cache is uint8 with a uint8 scale a row, not {numbers.dtype} "
            f"{tuple(numbers.shape)} with {scales.dtype} {tuple(scales.shape)}"
        )
    if numbers.device != scales.device:
        raise KernelInputError(f"{name} is on {numbers.device}, its scales on {scales.device}")


def gather(
    rows: tuple[torch.Tensor, torch.Tensor], scales: Scales, rows_S: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather and dequantise the K and V of some tokens. Return contiguous k_GSD and v_GSD in `dtype`.

    Args:
        rows: k_RGD and v_RGD.
        rows_S: int64, the cache row of each token, not checked, since a check would synchronise.

    Raises:
        KernelInputError: The arguments do not fit together.
    """
    for name, x_RGD, scale_RG in (("k", rows[0], scales.k), ("v", rows[1], scales.v)):
        check_quantised(name, x_RGD, scale_RG)
        if not (x_RGD.is_contiguous() and scale_RG.is_contiguous()) or x_RGD.shape != rows[0].shape:
            raise KernelInputError(f"{name}: k and v must be contiguous and alike, not {tuple(x_RGD.shape)}")
    if runs_on_cpu(rows[0], "gather"):
        k_GSD, v_GSD = (
            dequantise(x_RGD.index_select(0, rows_S), scale_RG.index_select(0, rows_S), dtype)
            .transpose(0, 1)
            .contiguous()
            for x_RGD, scale_RG in zip(rows, (scales.k, scales.v), strict=True)
        )
        return k_GSD, v_GSD
    return kernel_gather(rows, scales, rows_S, dtype)


_LEAST = tl.constexpr(LEAST)
_MOST = tl.constexpr(_LARGEST)
_NONE = tl.constexpr(NOT_A_NUMBER)
_APART = tl.constexpr(_TO_FLOAT32)
_MIDDLE = tl.constexpr(_ZERO)
_OVER_127 = tl.constexpr(1 / 127)
UNIT = tl.constexpr(2.0**-6)
"""A scale is `scale_of` its byte, times this."""


@triton.jit
def quantised_halves(low, high):
    """Quantise float32 rows, given as the lower and the upper half of their D channels: [tokens, heads, D/2]
    each. Return the numbers of both halves and one scale per row, all uint8."""
    largest = tl.max(tl.maximum(_magnitude(low), _magnitude(high)), 2)  # as integers, so that NaN wins
    least = _magnitude(largest.to(tl.float32, bitcast=True) * _OVER_127)
    upper = (tl.minimum(least, 0x7F800000) + 0xFFFFF) >> 20  # clamped, because a large NaN would overflow
    byte = tl.maximum(upper - _APART, _LEAST)
    shrink = tl.div_rn(1.0, ((byte + _APART) << 20).to(tl.float32, bitcast=True))[:, :, None]
    scale = tl.where(byte > _MOST, _NONE, byte).to(tl.uint8)
    return _number(low * shrink), _number(high * shrink), scale


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _number(x):
    return ((x + _MIDDLE).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def scale_of(byte):
    """Decode a scale byte to float32, in units of UNIT. NaN stays NaN."""
    return (byte.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)


_TOKENS = 16
"""Tokens per program."""


@triton.jit(do_not_specialize=["tokens"])
def gather_kernel(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, rows_ptr, k_out_ptr, v_out_ptr, tokens,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Gather and dequantise TOKENS tokens of one KV head."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    channel = tl.arange(0, BLOCK)[None, :]
    inside = exists[:, None] & (channel < D)
    row = tl.load(rows_ptr + token, mask=exists, other=0) * KV_HEADS + head
    place = row[:, None] * D + channel
    out = (head * tokens + token)[:, None] * D + channel
    kind = k_out_ptr.dtype.element_ty
    k_scale = scale_of(tl.load(k_scale_ptr + row, mask=exists, other=0)) * UNIT
    k = (tl.load(k_ptr + place, mask=inside, other=0).to(tl.float32) - 128.0) * k_scale[:, None]
    tl.store(k_out_ptr + out, k.to(kind), mask=inside)
    v_scale = scale_of(tl.load(v_scale_ptr + row, mask=exists, other=0)) * UNIT
    v = (tl.load(v_ptr + place, mask=inside, other=0).to(tl.float32) - 128.0) * v_scale[:, None]
    tl.store(v_out_ptr + out, v.to(kind), mask=inside)


_gather = Launcher(gather_kernel)


def kernel_gather(
    rows: tuple[torch.Tensor, torch.Tensor], scales: Scales, rows_S: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    _, kv_heads, dim = rows[0].shape
    tokens = len(rows_S)
    k_GSD, v_GSD = (torch.empty(kv_heads, tokens, dim, dtype=dtype, device=rows_S.device) for _ in rows)
    _gather[(cdiv(tokens, _TOKENS), kv_heads)](
        *rows,
        scales.k,
        scales.v,
        rows_S,
        k_GSD,
        v_GSD,
        tokens,
        KV_HEADS=kv_heads,
        D=dim,
        BLOCK=next_power_of_2(dim),
        TOKENS=_TOKENS,
        num_warps=4,
    )
    return k_GSD, v_GSD
