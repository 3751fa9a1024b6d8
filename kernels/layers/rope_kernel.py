"""Norms of q and k, rotation and the write of K/V on the GPU, in one pass over the fused projection.

Shape suffixes as in `rope.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launches import Launcher, cdiv, next_power_of_2
from .rope import HeadNorm, KVRows

_TOKENS, _HEADS = 4, 8
"""Of a program."""


@triton.jit(do_not_specialize=["tokens"])
def rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr, weight_ptr, k_ptr, v_ptr, rows_ptr, tokens, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """TOKENS rows, HEADS heads of each, as their first and second HALF of channels.

    q stays where it is; of the three stores each head takes part in one.
    """
    D: tl.constexpr = 2 * HALF
    TURNED: tl.constexpr = Q_HEADS + KV_HEADS
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[None, :, None]
    channel = tl.arange(0, BLOCK)[None, None, :]
    exists = (token < tokens)[:, None, None] & (channel < HALF)
    inside = exists & (head < TURNED + KV_HEADS)
    token = token.to(tl.int64)
    place = qkv_ptr + token[:, None, None] * ((TURNED + KV_HEADS) * D) + head * D + channel
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    # Each head loads its angles: from L1, and without the barriers that handing them round would take.
    angle = tl.broadcast_to(token[:, None, None] * HALF + channel, (TOKENS, HEADS, BLOCK))
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    turns = head < TURNED
    a = first
    b = second
    if NORMS:
        factor = tl.rsqrt((tl.sum(a * a, 2) + tl.sum(b * b, 2)) / D + eps)[:, :, None]
        weights = weight_ptr + head * D + channel
        named = turns & (channel < HALF)
        a = a * factor * tl.load(weights, mask=named, other=0.0).to(tl.float32)
        b = b * factor * tl.load(weights + HALF, mask=named, other=0.0).to(tl.float32)
    kind = k_ptr.dtype.element_ty
    low = tl.where(turns, a * cos - b * sin, first).to(kind)
    high = tl.where(turns, b * cos + a * sin, second).to(kind)
    is_q = inside & (head < Q_HEADS)
    tl.store(place, low, mask=is_q)
    tl.store(place + HALF, high, mask=is_q)
    if (tl.program_id(1) + 1) * HEADS > Q_HEADS:
        row = (
            tl.load(rows_ptr + token, mask=token < tokens, other=0)[:, None, None] * (KV_HEADS * D) + channel
        )
        is_k = inside & (head >= Q_HEADS) & turns
        k_place = k_ptr + row + (head - Q_HEADS) * D
        tl.store(k_place, low, mask=is_k)
        tl.store(k_place + HALF, high, mask=is_k)
        is_v = inside & (head >= TURNED)
        v_place = v_ptr + row + (head - TURNED) * D
        tl.store(v_place, low, mask=is_v)
        tl.store(v_place + HALF, high, mask=is_v)


_rotate = Launcher(rope_kernel)


def kernel_rotate_and_store(
    qkv_TXD: torch.Tensor,
    cos_T1F: torch.Tensor,
    sin_T1F: torch.Tensor,
    norm: HeadNorm | None,
    kv: KVRows,
) -> torch.Tensor:
    """See `rope.rotate_and_store`. q_THD is a view of qkv."""
    tokens, heads, dim = qkv_TXD.shape
    kv_heads = kv.k_RGD.shape[1]
    q_heads = heads - 2 * kv_heads
    _rotate[(cdiv(tokens, _TOKENS), cdiv(heads, _HEADS))](
        qkv_TXD,
        cos_T1F,
        sin_T1F,
        cos_T1F if norm is None else norm.weight_JD.contiguous(),
        kv.k_RGD,
        kv.v_RGD,
        kv.rows_T,
        tokens,
        0.0 if norm is None else norm.eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        NORMS=norm is not None,
        BLOCK=next_power_of_2(dim // 2),
        TOKENS=_TOKENS,
        HEADS=_HEADS,
        num_warps=4,
    )
    return qkv_TXD[:, :q_heads]


_TYPES = {
    **dict.fromkeys(("qkv_ptr", "weight_ptr", "k_ptr", "v_ptr"), "*bf16"),
    **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
    "rows_ptr": "*i64",
    "tokens": "i32",
    "eps": "fp32",
}
_TILE = {"TOKENS": _TOKENS, "HEADS": _HEADS}

COMPILE_CASES = [
    (rope_kernel, _TYPES, {"Q_HEADS": 32, "KV_HEADS": 8, "HALF": 64, "NORMS": norms, "BLOCK": 64, **_TILE})
    for norms in (False, True)
]
"""What tests/kernels compiles for sm_90: function, types of its arguments, constants."""
