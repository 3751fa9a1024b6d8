"""Applies QK norm and RoPE and writes K and V to the KV cache, in one pass over the fused QKV projection.

Shape suffixes: T tokens, X = H + 2 G heads of a fused row, H query heads, G key/value heads, J = H + G, D
head dimension, F = D / 2, R rows of a layer's KV cache.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from deltafront.kernels.interface import KernelInputError, runs_on_cpu
from deltafront.kernels.launches import Launcher, cdiv, next_power_of_2
from deltafront.kernels.layers.kv_int8 import Scales, check_quantised, quantise, quantised_halves


@dataclass(frozen=True)
class KVRows:
    """A layer's KV cache, and the cache row of each token: rows_T (int64), all different.

    Attributes:
        scales: Scales of 8-bit rows (`kv_int8`), [R, G]. None: rows have the model's dtype.
    """

    k_RGD: torch.Tensor
    v_RGD: torch.Tensor
    rows_T: torch.Tensor
    scales: Scales | None = None


@dataclass(frozen=True)
class HeadNorm:
    weight_JD: torch.Tensor
    eps: float


def rotate_and_store(
    qkv_TXD: torch.Tensor, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor, norm: HeadNorm | None, kv: KVRows
) -> torch.Tensor:
    """Apply QK norm and RoPE to q and k, and write k and v to their cache rows. Returns q_THD.

    Channel f pairs with channel f + D/2 (RoFormer, Su et al. 2021, equation 34).

    Args:
        qkv_TXD: Query heads, then key heads, then value heads. qkv_TXD is overwritten, and q_THD may be a
            view of it.
        cos_T1F, sin_T1F: float32, cosine and sine of each token's angles.
        norm: None: q and k are not normed.
        kv: Row numbers are not checked, since a check would synchronise.

    Raises:
        KernelInputError: The arguments do not fit together.
    """
    _check(qkv_TXD, cos_T1F, sin_T1F, norm, kv)
    if runs_on_cpu(qkv_TXD, "rotate_and_store"):
        return cpu_rotate_and_store(qkv_TXD, cos_T1F, sin_T1F, norm, kv)
    return kernel_rotate_and_store(qkv_TXD, cos_T1F, sin_T1F, norm, kv)


def cpu_rotate_and_store(
    qkv_TXD: torch.Tensor, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor, norm: HeadNorm | None, kv: KVRows
) -> torch.Tensor:
    kv_heads, dim = kv.k_RGD.shape[1:]
    turned = qkv_TXD.shape[1] - kv_heads
    qk_TJD, v_TGD = qkv_TXD[:, :turned], qkv_TXD[:, turned:]
    if norm is not None:
        qk_TJD = (F.rms_norm(qk_TJD, (dim,), None, norm.eps) * norm.weight_JD).to(qkv_TXD.dtype)
    qk_TJD = rotate(qk_TJD, cos_T1F, sin_T1F)
    k_TGD = qk_TJD[:, turned - kv_heads :]
    if kv.scales is not None:
        k_TGD, k_TG = quantise(k_TGD)
        v_TGD, v_TG = quantise(v_TGD)
        kv.scales.k.index_copy_(0, kv.rows_T, k_TG)
        kv.scales.v.index_copy_(0, kv.rows_T, v_TG)
    kv.k_RGD.index_copy_(0, kv.rows_T, k_TGD)
    kv.v_RGD.index_copy_(0, kv.rows_T, v_TGD)
    return qk_TJD[:, : turned - kv_heads]


def rotate(x_THD: torch.Tensor, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor) -> torch.Tensor:
    """Apply RoPE in float32, whatever x's dtype. In bf16, the angles of position 131,071 would be noise."""
    first_THF, second_THF = x_THD.chunk(2, dim=-1)
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    half = x_THD.shape[-1] // 2
    torch.addcmul(first_THF * cos_T1F, second_THF, sin_T1F, value=-1, out=out_THD[..., :half])
    torch.addcmul(second_THF * cos_T1F, first_THF, sin_T1F, out=out_THD[..., half:])
    return out_THD


def _check(
    qkv_TXD: torch.Tensor, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor, norm: HeadNorm | None, kv: KVRows
) -> None:
    tokens, heads, dim = qkv_TXD.shape
    rows, kv_heads = kv.k_RGD.shape[:2]
    if kv.k_RGD.shape != (rows, kv_heads, dim) or kv.v_RGD.shape != kv.k_RGD.shape or heads <= 2 * kv_heads:
        raise KernelInputError(
            f"rotate_and_store: k {tuple(kv.k_RGD.shape)} and v {tuple(kv.v_RGD.shape)} for rows of {heads} "
            f"heads of {dim}"
        )
    if not (qkv_TXD.is_contiguous() and kv.k_RGD.is_contiguous() and kv.v_RGD.is_contiguous()):
        raise KernelInputError("rotate_and_store: qkv, k and v must be contiguous")
    if kv.scales is not None:
        for name, x_RGD, scale_RG in (
            ("k", kv.k_RGD, kv.scales.k),
            ("v", kv.v_RGD, kv.scales.v),
        ):
            check_quantised(f"rotate_and_store: {name}", x_RGD, scale_RG)
            if not scale_RG.is_contiguous():
                raise KernelInputError("rotate_and_store: scales must be contiguous")
    elif not qkv_TXD.dtype == kv.k_RGD.dtype == kv.v_RGD.dtype:
        raise KernelInputError(
            f"rotate_and_store: qkv is {qkv_TXD.dtype}, k {kv.k_RGD.dtype}, v {kv.v_RGD.dtype}"
        )
    if kv.rows_T.shape != (tokens,) or kv.rows_T.dtype != torch.int64:
        raise KernelInputError(
            f"rotate_and_store: {kv.rows_T.dtype} rows {tuple(kv.rows_T.shape)} for {tokens} tokens"
        )
    for name, x in (("cos", cos_T1F), ("sin", sin_T1F)):
        if x.shape != (tokens, 1, dim // 2) or x.dtype != torch.float32 or not x.is_contiguous():
            raise KernelInputError(f"rotate_and_store: {name} is {x.dtype} {tuple(x.shape)}")
    if norm is not None and norm.weight_JD.shape != (heads - kv_heads, dim):
        raise KernelInputError(f"rotate_and_store: norm weights {tuple(norm.weight_JD.shape)}")


_TOKENS, _HEADS = 4, 8
"""Tokens and heads of one program."""


@triton.jit(do_not_specialize=["tokens"])
def rope_kernel(
    qkv_ptr, cos_ptr, sin_ptr, weight_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, rows_ptr, tokens,
    eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr,
    INT8: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of TOKENS tokens. Store q in place, k and v in their cache rows.

    A head's channels are loaded as two halves of HALF channels.
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
    # Each head loads the angles again, from L1. Sharing them between heads would take barriers.
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
    kind = qkv_ptr.dtype.element_ty
    low = tl.where(turns, a * cos - b * sin, first).to(kind)
    high = tl.where(turns, b * cos + a * sin, second).to(kind)
    is_q = inside & (head < Q_HEADS)
    tl.store(place, low, mask=is_q)
    tl.store(place + HALF, high, mask=is_q)
    if (tl.program_id(1) + 1) * HEADS > Q_HEADS:
        row = (
            tl.load(rows_ptr + token, mask=token < tokens, other=0)[:, None, None] * (KV_HEADS * D) + channel
        )
        kept_low = low
        kept_high = high
        if INT8:  # quantise the numbers after rounding them to 16 bits, as 16-bit pages would hold them
            kept_low, kept_high, scale = quantised_halves(low.to(tl.float32), high.to(tl.float32))
        is_k = inside & (head >= Q_HEADS) & turns
        k_place = k_ptr + row + (head - Q_HEADS) * D
        tl.store(k_place, kept_low, mask=is_k)
        tl.store(k_place + HALF, kept_high, mask=is_k)
        is_v = inside & (head >= TURNED)
        v_place = v_ptr + row + (head - TURNED) * D
        tl.store(v_place, kept_low, mask=is_v)
        tl.store(v_place + HALF, kept_high, mask=is_v)
        if INT8:
            kv_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :] - Q_HEADS
            kv_row = tl.load(rows_ptr + token, mask=token < tokens, other=0)[:, None] * KV_HEADS + kv_head
            here = (token < tokens)[:, None] & (kv_head >= 0) & (kv_head < 2 * KV_HEADS)
            tl.store(k_scale_ptr + kv_row, scale, mask=here & (kv_head < KV_HEADS))
            tl.store(v_scale_ptr + kv_row - KV_HEADS, scale, mask=here & (kv_head >= KV_HEADS))


_rotate = Launcher(rope_kernel)


def kernel_rotate_and_store(
    qkv_TXD: torch.Tensor, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor, norm: HeadNorm | None, kv: KVRows
) -> torch.Tensor:
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
        None if kv.scales is None else kv.scales.k,
        None if kv.scales is None else kv.scales.v,
        kv.rows_T,
        tokens,
        0.0 if norm is None else norm.eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        NORMS=norm is not None,
        INT8=kv.scales is not None,
        BLOCK=next_power_of_2(dim // 2),
        TOKENS=_TOKENS,
        HEADS=_HEADS,
        num_warps=4,
    )
    return qkv_TXD[:, :q_heads]
