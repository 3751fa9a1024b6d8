"""Sums of scores between groups of rows, on the GPU; what XAttention, `naive` and `block_pool` share.

Shape suffixes as in `kernels.interface`; I query groups, J key groups of `step` rows each; Y columns of a key
tile, W key blocks of it. The logit of two groups is the sum over u < slots of q[step i + u] .
k[step j + slots-1-u]: antidiagonals for slots = step, every step-th row for slots = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..anchors.kernel import check_head_dim
from ..interface import BLOCK, AttentionInput
from .rules.kernel import LOG2_E, empty_parts

_TILE = 128


@triton.jit
def _own_kernel(
    q_ptr,
    k_ptr,
    own_ptr,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kg,
    stride_ks,
    heads,
    share,
    rows,
    q_start,
    groups_I,
    scale_log2,
    D: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Logits of groups against themselves, over the pairs whose key is not after the query."""
    group_I = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // share * stride_kg
    column_D = tl.arange(0, D)
    total_I = tl.zeros((ROWS,), tl.float32)
    for slot in range(STEP // 2, STEP):
        row_I = group_I * STEP + slot
        real_I1 = (row_I < rows)[:, None]
        key_I = q_start + group_I * STEP + STEP - 1 - slot
        q_ID = tl.load(
            q_ptr + row_I[:, None].to(tl.int64) * stride_qt + column_D[None, :], mask=real_I1, other=0.0
        )
        k_ID = tl.load(
            k_ptr + key_I[:, None].to(tl.int64) * stride_ks + column_D[None, :], mask=real_I1, other=0.0
        )
        total_I += tl.sum(q_ID.to(tl.float32) * k_ID.to(tl.float32), axis=1)
    pairs_I = tl.minimum(tl.maximum(rows - group_I * STEP - STEP // 2, 0), STEP - STEP // 2)
    own_I = tl.where(pairs_I > 0, total_I * scale_log2 / tl.maximum(pairs_I, 1), float("-inf"))
    tl.store(own_ptr + tl.program_id(1).to(tl.int64) * groups_I + group_I, own_I, mask=group_I < groups_I)


@triton.jit
def _grouped_kernel(
    q_ptr,
    k_ptr,
    own_ptr,
    out_ptr,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kg,
    stride_ks,
    stride_ob,
    stride_oh,
    stride_oi,
    heads,
    share,
    rows,
    keys,
    q_start,
    first_group,
    last_group,
    groups_I,
    scale_log2,
    D: tl.constexpr,
    STEP: tl.constexpr,
    SLOTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of X query groups against all key groups they may see; log2 sums per key block.

    Query groups first_group .. last_group-1 of the chunk are the slab. OWN: own_ptr holds the logits of
    groups against themselves; otherwise (one slot) they are like any other.
    """
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # long rows first
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    W: tl.constexpr = Y // PER_BLOCK
    group_X = first_group + tile * X + tl.arange(0, X)
    absolute_X = q_start // STEP + group_X
    real_X = group_X < last_group
    filled_X = tl.minimum(tl.maximum(rows - group_X * STEP, 0), SLOTS)
    factor_X = scale_log2 / tl.maximum(filled_X, 1)
    own_X = tl.zeros((X,), tl.float32)
    if SLOTS > 1:
        own_X = tl.load(
            own_ptr + tl.program_id(0).to(tl.int64) * groups_I + group_X, mask=real_X, other=float("-inf")
        )
    column_D = tl.arange(0, D)
    column_Y = tl.arange(0, Y)
    block_W = tl.arange(0, W)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // share * stride_kg
    out_X = out_ptr + batch * stride_ob + head * stride_oh + (group_X - first_group).to(tl.int64) * stride_oi
    last = tl.minimum(first_group + tile * X + X, last_group) - 1 + q_start // STEP
    end = last // PER_BLOCK + 1
    for block in range(0, end, W):
        group_Y = block * PER_BLOCK + column_Y
        score_XY = tl.zeros((X, Y), tl.float32)
        for slot in tl.range(0, SLOTS, num_stages=STAGES):
            row_X = group_X * STEP + slot
            row_Y = group_Y * STEP + SLOTS - 1 - slot
            q_XD = tl.load(
                q_ptr + row_X[:, None].to(tl.int64) * stride_qt + column_D[None, :],
                mask=(row_X < rows)[:, None],
                other=0.0,
            )
            k_YD = tl.load(
                k_ptr + row_Y[:, None].to(tl.int64) * stride_ks + column_D[None, :],
                mask=(row_Y < keys)[:, None],
                other=0.0,
            )
            score_XY = tl.dot(q_XD, tl.trans(k_YD), score_XY, input_precision="ieee")
        score_XY *= factor_X[:, None]
        if block + W > tile_first_block(first_group + tile * X, q_start, STEP, PER_BLOCK):
            if SLOTS > 1:
                score_XY = tl.where(group_Y[None, :] == absolute_X[:, None], own_X[:, None], score_XY)
            score_XY = tl.where(group_Y[None, :] <= absolute_X[:, None], score_XY, float("-inf"))
        score_XY = tl.where((filled_X > 0)[:, None], score_XY, float("-inf"))
        score_XWP = tl.reshape(score_XY, (X, W, PER_BLOCK))
        top_XW = tl.max(score_XWP, axis=2)
        base_XW = tl.where(top_XW == float("-inf"), 0.0, top_XW)
        sums_XW = base_XW + tl.log2(tl.sum(tl.exp2(score_XWP - base_XW[:, :, None]), axis=2))
        tl.store(
            out_X[:, None] + (block + block_W[None, :]),
            sums_XW.to(out_ptr.dtype.element_ty),
            mask=real_X[:, None] & (block + block_W[None, :] < end),
        )


@triton.jit
def tile_first_block(group, q_start, STEP: tl.constexpr, PER_BLOCK: tl.constexpr):
    """The diagonal key block of a chunk's query group."""
    return (q_start // STEP + group) // PER_BLOCK


@dataclass(frozen=True)
class Grouping:
    """Rows per group, rows of a group that are paired (all, or the first), groups per block."""

    step: int
    slots: int
    per_block: int


def log_sums(
    q_BHTD: torch.Tensor,
    k_BGSD: torch.Tensor,
    q_start: int,
    scale: float,
    grouping: Grouping,
    *,
    first_row: int,
    blocks: int,
    own_BHI: torch.Tensor | None = None,
) -> torch.Tensor:
    """log2 of the sums of e^logit per query group and key block: fp16 part_BHNRM.

    For N = `blocks` query blocks from `first_row` of q on, R = groups per block; M covers the key blocks of
    the last of them. own_BHI comes from `own_logits` where more than one slot is paired.
    """
    batch, heads, rows, dim = q_BHTD.shape
    check_head_dim(dim)
    per_block = grouping.per_block
    columns = q_start // grouping.step // per_block + first_row + blocks
    part = empty_parts(q_BHTD, (batch, heads, blocks, per_block), columns)
    _grouped_kernel[(batch * heads, triton.cdiv(blocks * per_block, _TILE))](
        q_BHTD,
        k_BGSD,
        own_BHI,
        part,
        *q_BHTD.stride()[:3],
        *k_BGSD.stride()[:3],
        *part.stride()[:2],
        part.stride(3),
        heads,
        heads // k_BGSD.shape[1],
        rows,
        k_BGSD.shape[2],
        q_start,
        first_row * per_block,
        (first_row + blocks) * per_block,
        0 if own_BHI is None else own_BHI.shape[2],
        scale * LOG2_E,
        D=dim,
        STEP=grouping.step,
        SLOTS=grouping.slots,
        PER_BLOCK=per_block,
        X=_TILE,
        Y=_TILE,
        STAGES=3,
        num_warps=8,
    )
    return part


def own_logits(x: AttentionInput, step: int) -> torch.Tensor:
    """Logits, times log2 e, of the chunk's groups against themselves: float32 own_BHI; -inf where none."""
    batch, heads, rows, dim = x.q_BHTD.shape
    check_head_dim(dim)
    groups = x.query_blocks * (BLOCK // step)
    own_BHI = torch.empty((batch, heads, groups), dtype=torch.float32, device=x.q_BHTD.device)
    _own_kernel[(triton.cdiv(groups, 32), batch * heads)](
        x.q_BHTD,
        x.k_BGSD,
        own_BHI,
        *x.q_BHTD.stride()[:3],
        *x.k_BGSD.stride()[:3],
        heads,
        x.group,
        rows,
        x.q_start,
        groups,
        x.scale * LOG2_E,
        D=dim,
        STEP=step,
        ROWS=32,
        num_warps=4,
    )
    return own_BHI
