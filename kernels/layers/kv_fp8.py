"""K/V in 8 bits: a row of D channels, one key/value head of one token, is D numbers in e4m3 and an exponent.

Channel d stands for value[d] · 2^exponent. The exponent follows from the row alone, so a page that fills
token by token is never written again. A power of two moves e4m3's range and costs no precision.

Numbers are kept as uint8, since torch copies and gathers that on every device. Suffixes: R rows of a layer's
K/V memory, G key/value heads, D head dimension, S tokens of a sequence.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..interface import KernelInputError, runs_on_cpu
from ..launches import Launcher, cdiv, next_power_of_2

BYTES, EXPONENTS = torch.uint8, torch.int8
"""Types of a row's numbers and of its exponent."""
TOP = 7
"""The largest channel of a row is at least 2^7 and less than 2^8 times 2^exponent; e4m3 ends at 448."""
FURTHEST = 60
"""Exponents lie within -60 .. 60. Smaller rows lose small channels, channels of larger ones become NaN."""

_NAN_FROM = 464.0
"""The least number that rounds to one beyond 448."""


@dataclass(frozen=True)
class Exponents:
    """Those of k and of v, int8: their memory without the last dimension."""

    k: torch.Tensor
    v: torch.Tensor


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 (uint8, x's shape) and exponents (int8, without the last dimension). Rounds to the nearest,
    ties to even."""
    x = x.float()
    biased = x.abs().amax(-1).view(torch.int32) >> 23
    exponent = (biased - (127 + TOP)).clamp(-FURTHEST, FURTHEST)
    values = x * _power_of_2(-exponent)
    values = torch.where(values.abs() < _NAN_FROM, values, torch.nan)  # torch would take the largest
    return values.to(torch.float8_e4m3fn).view(BYTES), exponent.to(EXPONENTS)


def dequantise(values: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values: e4m3 [..., D], uint8. exponents: int8 [...]. Exact where `dtype` holds the row's range."""
    numbers = values.view(torch.float8_e4m3fn).float()
    return (numbers * _power_of_2(exponents.int())).to(dtype)


def _power_of_2(exponent: torch.Tensor) -> torch.Tensor:
    """Exact, unlike a GPU's pow; with a last dimension of 1. exponent: int32."""
    return ((exponent + 127) << 23).view(torch.float32)[..., None]


def check_quantised(name: str, values: torch.Tensor, exponents: torch.Tensor) -> None:
    """Raises KernelInputError unless these belong together."""
    if values.dtype != BYTES or exponents.dtype != EXPONENTS or exponents.shape != values.shape[:-1]:
        raise KernelInputError(
            f"{name}: 8-bit K/V is uint8 with an int8 exponent a row, not {values.dtype} "
            f"{tuple(values.shape)} with {exponents.dtype} {tuple(exponents.shape)}"
        )
    if values.device != exponents.device:
        raise KernelInputError(f"{name} is on {values.device}, its exponents on {exponents.device}")


def gather(
    rows: tuple[torch.Tensor, torch.Tensor], exponents: Exponents, rows_S: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return some tokens' k_GSD and v_GSD in `dtype`, contiguous, by one kernel.

    Args:
        rows: k_RGD and v_RGD.
        rows_S: int64, not checked, which would wait for the device.

    Raises:
        KernelInputError: the arguments do not fit together.
    """
    for name, x_RGD, exponent_RG in (("k", rows[0], exponents.k), ("v", rows[1], exponents.v)):
        check_quantised(name, x_RGD, exponent_RG)
        if not (x_RGD.is_contiguous() and exponent_RG.is_contiguous()) or x_RGD.shape != rows[0].shape:
            raise KernelInputError(f"{name}: k and v must be contiguous and alike, not {tuple(x_RGD.shape)}")
    if runs_on_cpu(rows[0], "gather"):
        k_GSD, v_GSD = (
            dequantise(x_RGD.index_select(0, rows_S), exponent_RG.index_select(0, rows_S), dtype)
            .transpose(0, 1)
            .contiguous()
            for x_RGD, exponent_RG in zip(rows, (exponents.k, exponents.v), strict=True)
        )
        return k_GSD, v_GSD
    return kernel_gather(rows, exponents, rows_S, dtype)


_LEAST_BIASED = tl.constexpr(127 + TOP)
_FURTHEST = tl.constexpr(FURTHEST)
_BIASES = tl.constexpr(2.0**120)
_UNBIASED = tl.constexpr(2.0**-120)
"""float32's bias is 127, e4m3's 7."""


@triton.jit
def exponents_of(largest):
    """int32 exponents of rows whose largest magnitudes these are, float32."""
    biased = largest.to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(biased - _LEAST_BIASED, -_FURTHEST), _FURTHEST)


@triton.jit
def power_of_2(exponent):
    """float32. exponent: int32 within -126 .. 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encoded(x):
    """The nearest e4m3 of float32, as uint8; NaN from 464 on. In float32 divided by 2^120, e4m3's bits are
    the upper ones, subnormal numbers included."""
    bits = (x * _UNBIASED).to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7F800000)  # a NaN with more bits would overflow below
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    return (tl.minimum(rounded, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantised_halves(low, high):
    """Rows' e4m3, their last dimension in two halves, and exponents, int8. low, high: float32
    [tokens, heads, D / 2]."""
    exponent = exponents_of(tl.maximum(tl.max(tl.abs(low), 2), tl.max(tl.abs(high), 2)))
    shrink = power_of_2(-exponent)[:, :, None]
    return encoded(low * shrink), encoded(high * shrink), exponent.to(tl.int8)


@triton.jit
def decoded(byte):
    """e4m3 as float32."""
    bits = byte.to(tl.int32)
    number = (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * _BIASES
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)


_TOKENS = 16
"""A program's."""


@triton.jit(do_not_specialize=["tokens"])
def gather_kernel(
    k_ptr, v_ptr, k_exponent_ptr, v_exponent_ptr, rows_ptr, k_out_ptr, v_out_ptr, tokens,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one head: program (tokens, head)."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    channel = tl.arange(0, BLOCK)[None, :]
    inside = exists[:, None] & (channel < D)
    row = tl.load(rows_ptr + token, mask=exists, other=0) * KV_HEADS + head
    place = row[:, None] * D + channel
    out = (head * tokens + token)[:, None] * D + channel
    kind = k_out_ptr.dtype.element_ty
    k_scale = power_of_2(tl.load(k_exponent_ptr + row, mask=exists, other=0).to(tl.int32))
    k = decoded(tl.load(k_ptr + place, mask=inside, other=0)) * k_scale[:, None]
    tl.store(k_out_ptr + out, k.to(kind), mask=inside)
    v_scale = power_of_2(tl.load(v_exponent_ptr + row, mask=exists, other=0).to(tl.int32))
    v = decoded(tl.load(v_ptr + place, mask=inside, other=0)) * v_scale[:, None]
    tl.store(v_out_ptr + out, v.to(kind), mask=inside)


_gather = Launcher(gather_kernel)


def kernel_gather(
    rows: tuple[torch.Tensor, torch.Tensor], exponents: Exponents, rows_S: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    _, kv_heads, dim = rows[0].shape
    tokens = len(rows_S)
    k_GSD, v_GSD = (torch.empty(kv_heads, tokens, dim, dtype=dtype, device=rows_S.device) for _ in rows)
    _gather[(cdiv(tokens, _TOKENS), kv_heads)](
        *rows,
        exponents.k,
        exponents.v,
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
