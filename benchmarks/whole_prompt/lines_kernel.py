"""Computes masses of vertical and slash lines on the GPU, in two passes over the keys.

The first pass writes every row's maximum and sum of exponentials for each split of the keys. The second
computes the logits again and adds up their weights, so no tensor of R x S is stored. `lines.last_attention`
and `lines.line_masses` define the masses.

Shape suffixes are defined in `kernels.interface`; R last query rows of a head, K the 128 keys of a block, C
splits of the keys, I the three bands of distance that a tile of R x 128 can cross.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltafront.kernels.anchor_scan import check_head_dim
from deltafront.kernels.constants import BLOCK, LOG2E
from deltafront.kernels.interface import AttentionInput, KernelInputError

_SPLITS = 32
"""Maximum number of splits per head: enough for 132 multiprocessors, few enough to merge in registers."""


@triton.jit
def _last_rows(q_ptr, stride_qt, rows, keys, D: tl.constexpr, R: tl.constexpr):
    """Load the last R rows of q and their positions. Rows that do not exist are zeros at position -1."""
    row_R = rows - R + tl.arange(0, R)
    q_RD = tl.load(
        q_ptr + row_R[:, None].to(tl.int64) * stride_qt + tl.arange(0, D)[None, :],
        mask=(row_R >= 0)[:, None],
        other=0.0,
    )
    return q_RD, tl.where(row_R >= 0, keys - rows + row_R, -1)


@triton.jit
def _seen_logits(q_RD, k_ptr, stride_ks, key_K, position_R, keys, scale_log2, D: tl.constexpr):
    """Compute logits times log2 e of the rows against one block of keys. Keys after the row get -inf."""
    k_KD = tl.load(
        k_ptr + key_K[:, None].to(tl.int64) * stride_ks + tl.arange(0, D)[None, :],
        mask=(key_K < keys)[:, None],
        other=0.0,
    )
    logit_RK = tl.dot(q_RD, tl.trans(k_KD), input_precision="ieee") * scale_log2
    return tl.where(key_K[None, :] <= position_R[:, None], logit_RK, float("-inf"))


@triton.jit
def _sums_kernel(
    q_ptr, k_ptr, m_ptr, l_ptr, stride_qb, stride_qh, stride_qt, stride_kb, stride_kg, stride_ks, heads,
    group, rows, keys, per_split, scale_log2,
    D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one head and split: each row's maximum (-inf if all is masked) and sum of exponentials."""
    lane = tl.program_id(0)
    batch = (lane // heads).to(tl.int64)
    head = (lane % heads).to(tl.int64)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // group * stride_kg
    q_RD, position_R = _last_rows(q_ptr, stride_qt, rows, keys, D, R)
    m_R = tl.full((R,), float("-inf"), tl.float32)
    l_R = tl.zeros((R,), tl.float32)
    first = tl.program_id(1) * per_split
    for block in range(first, tl.minimum(first + per_split, tl.cdiv(keys, BLOCK))):
        key_K = block * BLOCK + tl.arange(0, BLOCK)
        logit_RK = _seen_logits(q_RD, k_ptr, stride_ks, key_K, position_R, keys, scale_log2, D)
        m_new_R = tl.maximum(m_R, tl.max(logit_RK, axis=1))
        base_R = tl.where(m_new_R == float("-inf"), 0.0, m_new_R)
        l_R = l_R * tl.exp2(m_R - base_R) + tl.sum(tl.exp2(logit_RK - base_R[:, None]), axis=1)
        m_R = m_new_R
    place_R = (lane.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * R + tl.arange(0, R)
    tl.store(m_ptr + place_R, m_R)
    tl.store(l_ptr + place_R, l_R)


@triton.jit
def _masses_kernel(
    q_ptr, k_ptr, m_ptr, l_ptr, vertical_ptr, band_ptr, stride_qb, stride_qh, stride_qt, stride_kb,
    stride_kg, stride_ks, heads, group, rows, keys, per_split, first_band, scale_log2,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For one head and split, compute the mass of each key block, in total and by band.

    first_band: The nearest band that tiles of block 0 can cross. It is one less for each later block.
    band_ptr has three planes of M numbers, so that no two programs write to the same place.
    """
    lane = tl.program_id(0)
    batch = (lane // heads).to(tl.int64)
    head = (lane % heads).to(tl.int64)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // group * stride_kg
    q_RD, position_R = _last_rows(q_ptr, stride_qt, rows, keys, D, R)
    split_C = tl.arange(0, C)
    valid_C1 = (split_C < tl.num_programs(1))[:, None]
    place_CR = (lane.to(tl.int64) * tl.num_programs(1) + split_C[:, None]) * R + tl.arange(0, R)[None, :]
    m_CR = tl.load(m_ptr + place_CR, mask=valid_C1, other=float("-inf"))
    l_CR = tl.load(l_ptr + place_CR, mask=valid_C1, other=0.0)
    m_R = tl.max(m_CR, axis=0)
    m_R = tl.where(m_R == float("-inf"), 0.0, m_R)
    l_R = tl.sum(l_CR * tl.exp2(m_CR - m_R[None, :]), axis=0)
    inverse_R = 1.0 / tl.where(l_R > 0.0, l_R, 1.0)
    blocks = tl.cdiv(keys, BLOCK)
    vertical_ptr += lane.to(tl.int64) * blocks
    band_ptr += lane.to(tl.int64) * 3 * blocks
    first = tl.program_id(1) * per_split
    for block in range(first, tl.minimum(first + per_split, blocks)):
        key_K = block * BLOCK + tl.arange(0, BLOCK)
        logit_RK = _seen_logits(q_RD, k_ptr, stride_ks, key_K, position_R, keys, scale_log2, D)
        mass_RK = tl.exp2(logit_RK - m_R[:, None]) * inverse_R[:, None]
        nearest = first_band - block
        past_RK = position_R[:, None] - key_K[None, :] - nearest * BLOCK  # 0 .. 3 * BLOCK - 1 if not masked
        near = tl.sum(tl.sum(tl.where(past_RK < BLOCK, mass_RK, 0.0), axis=1), axis=0)
        far = tl.sum(tl.sum(tl.where(past_RK >= 2 * BLOCK, mass_RK, 0.0), axis=1), axis=0)
        between_RK = (past_RK >= BLOCK) & (past_RK < 2 * BLOCK)
        middle = tl.sum(tl.sum(tl.where(between_RK, mass_RK, 0.0), axis=1), axis=0)
        tl.store(vertical_ptr + block, near + middle + far)
        tl.store(band_ptr + nearest, near, mask=nearest >= 0)
        tl.store(band_ptr + blocks + nearest + 1, middle, mask=(nearest >= -1) & (nearest + 1 < blocks))
        tl.store(band_ptr + 2 * blocks + nearest + 2, far, mask=(nearest >= -2) & (nearest + 2 < blocks))


def kernel_line_masses(x: AttentionInput, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `lines.cpu_line_masses` on the GPU: masses by key block and by band, both float32 (B, H, M)."""
    if queries not in (64, 128):
        raise KernelInputError(f"line masses are of the last 64 or 128 queries, not {queries}")
    batch, heads, rows, dim = x.q_BHTD.shape
    check_head_dim(dim)
    keys, lanes, device = x.k_BGSD.shape[2], batch * heads, x.q_BHTD.device
    per_split = triton.cdiv(x.key_blocks, _SPLITS)
    splits = triton.cdiv(x.key_blocks, per_split)
    m_CR = torch.empty((lanes, splits, queries), dtype=torch.float32, device=device)
    l_CR = torch.empty_like(m_CR)
    vertical_BHM = torch.empty((batch, heads, x.key_blocks), dtype=torch.float32, device=device)
    band_BHIM = torch.zeros((batch, heads, 3, x.key_blocks), dtype=torch.float32, device=device)
    strides = (*x.q_BHTD.stride()[:3], *x.k_BGSD.stride()[:3])
    sizes = (heads, x.group, rows, keys, per_split)
    scale, warps = x.scale * LOG2E, queries // 16
    stages = 2 if x.q_BHTD.element_size() == 4 else 3
    _sums_kernel[(lanes, splits)](
        x.q_BHTD,
        x.k_BGSD,
        m_CR,
        l_CR,
        *strides,
        *sizes,
        scale,
        D=dim,
        R=queries,
        BLOCK=BLOCK,
        num_warps=warps,
        num_stages=stages,
    )
    _masses_kernel[(lanes, splits)](
        x.q_BHTD,
        x.k_BGSD,
        m_CR,
        l_CR,
        vertical_BHM,
        band_BHIM,
        *strides,
        *sizes,
        (keys - queries - (BLOCK - 1)) // BLOCK,
        scale,
        D=dim,
        R=queries,
        C=_SPLITS,
        BLOCK=BLOCK,
        num_warps=warps,
        num_stages=stages,
    )
    return vertical_BHM, band_BHIM.sum(2)
