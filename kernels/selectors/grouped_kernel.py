"""Sums of scores between groups of rows, on the GPU; what XAttention, `naive` and `block_pool` share.

Shape suffixes as in `kernels.interface`; I query groups, J key groups of `step` rows each; F the numbers of a
group that are multiplied, slots x D; X query groups and Y key groups of a tile, W key blocks of it. The logit
of two groups is the sum over u < slots of q[step i + u] . k[step j + slots-1-u]: antidiagonals for slots =
step, every step-th row for slots = 1. The groups are copied side by side first, in 8 bits where the inputs
have 16: the products are bound by L2 reads, and each logit is a mean over many rounded products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..anchors.kernel import check_head_dim
from ..interface import BLOCK, AttentionInput
from .rules.kernel import LOG2_E, empty_parts, fast_log2

_TILE_X, _TILE_Y = 128, 256


@triton.jit
def _pack_kernel(
    x_ptr,
    out_ptr,
    stride_xb,
    stride_xg,
    stride_xs,
    groups,
    rows,
    padded_I,
    D: tl.constexpr,
    STEP: tl.constexpr,
    SLOTS: tl.constexpr,
    REVERSED: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The first SLOTS rows of each group side by side, zeros past the end, cut off at +-LIMIT."""
    lane = tl.program_id(1).to(tl.int64)
    x_ptr += lane // groups * stride_xb + lane % groups * stride_xg
    place_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot_R = place_R % SLOTS
    if REVERSED:
        slot_R = SLOTS - 1 - slot_R
    row_R = place_R // SLOTS * STEP + slot_R
    column_D = tl.arange(0, D)
    x_RD = tl.load(
        x_ptr + row_R[:, None].to(tl.int64) * stride_xs + column_D[None, :],
        mask=(row_R < rows)[:, None],
        other=0.0,
    )
    x_RD = tl.minimum(tl.maximum(x_RD.to(tl.float32), -LIMIT), LIMIT)
    place_RD = (lane * padded_I * SLOTS + place_R[:, None]) * D + column_D[None, :]
    tl.store(
        out_ptr + place_RD, x_RD.to(out_ptr.dtype.element_ty), mask=(place_R < padded_I * SLOTS)[:, None]
    )


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
    q_desc,
    k_desc,
    own_ptr,
    out_ptr,
    stride_ob,
    stride_oh,
    stride_oi,
    heads,
    share,
    rows,
    padded_I,
    padded_J,
    own_groups,
    start_group,
    first_group,
    last_group,
    scale_log2,
    STEP: tl.constexpr,
    SLOTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    F: tl.constexpr,
    BF: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    STAGES: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """One tile of X query groups against all key groups they may see; log2 sums per key block.

    The slab is the query groups first_group .. last_group-1 of q, whose first group is the prompt's
    start_group. With several slots own_ptr holds the logits of groups against themselves.
    """
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # long rows first
    lane = tl.program_id(0)
    batch = lane // heads
    head = lane % heads
    W: tl.constexpr = Y // PER_BLOCK
    group_X = first_group + tile * X + tl.arange(0, X)
    absolute_X = start_group + group_X
    real_X = group_X < last_group
    filled_X = tl.minimum(tl.maximum(rows - group_X * STEP, 0), SLOTS)
    factor_X = scale_log2 / tl.maximum(filled_X, 1)
    own_X = tl.zeros((X,), tl.float32)
    if SLOTS > 1:
        own_X = tl.load(own_ptr + lane.to(tl.int64) * own_groups + group_X, mask=real_X, other=float("-inf"))
        own_X = own_X / factor_X
    q_row = lane * padded_I + first_group + tile * X
    k_row = (batch * (heads // share) + head // share) * padded_J
    column_Y = tl.arange(0, Y)
    block_W = tl.arange(0, W)
    out_X = out_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    out_X += (group_X - first_group).to(tl.int64) * stride_oi
    end = (tl.minimum(first_group + tile * X + X, last_group) - 1 + start_group) // PER_BLOCK + 1
    for block in tl.range(0, end, W, flatten=FLATTEN):
        score_XY = tl.zeros((X, Y), tl.float32)
        for part in tl.range(0, F, BF, num_stages=STAGES):
            q_XF = q_desc.load([q_row, part])
            k_YF = k_desc.load([k_row + block * PER_BLOCK, part])
            score_XY = tl.dot(q_XF, tl.trans(k_YF), score_XY, input_precision="ieee")
        group_Y = block * PER_BLOCK + column_Y
        if (block + W) * PER_BLOCK > start_group + first_group + tile * X:
            if SLOTS > 1:
                score_XY = tl.where(group_Y[None, :] == absolute_X[:, None], own_X[:, None], score_XY)
            score_XY = tl.where(group_Y[None, :] <= absolute_X[:, None], score_XY, float("-inf"))
        score_XWP = tl.reshape(score_XY, (X, W, PER_BLOCK))
        top_XW = tl.max(score_XWP, axis=2)
        base_XW = tl.where(top_XW == float("-inf"), 0.0, top_XW * factor_X[:, None])
        mass_XWP = tl.exp2(score_XWP * factor_X[:, None, None] - base_XW[:, :, None])
        sums_XW = base_XW + fast_log2(tl.sum(mass_XWP, axis=2))
        sums_XW = tl.where((filled_X > 0)[:, None], sums_XW, float("-inf"))
        tl.store(
            out_X[:, None] + (block + block_W[None, :]),
            sums_XW.to(out_ptr.dtype.element_ty),
            mask=real_X[:, None] & (block + block_W[None, :] < end),
        )


@dataclass(frozen=True)
class Grouping:
    """Rows per group, rows of a group that are paired (all, or the first), groups per block."""

    step: int
    slots: int
    per_block: int


@dataclass(frozen=True)
class Packed:
    """Groups side by side: q_XF and k_XF hold (lanes x padded groups, slots x D); own_BHI as in
    `own_logits`, None for one slot. rows, start: query rows and the prompt's group where they begin."""

    q_XF: torch.Tensor
    k_XF: torch.Tensor
    own_BHI: torch.Tensor | None
    grouping: Grouping
    batch: int
    heads: int
    share: int
    rows: int
    start: int
    scale: float


def pack(
    q_BHTD: torch.Tensor,
    k_BGSD: torch.Tensor,
    q_start: int,
    scale: float,
    grouping: Grouping,
    own_BHI: torch.Tensor | None = None,
) -> Packed:
    """Copy q's and k's groups side by side; k's rows in reverse within their group."""
    batch, heads, rows, _ = q_BHTD.shape
    return Packed(
        _packed(q_BHTD, grouping, _TILE_X, reverse=False),
        _packed(k_BGSD, grouping, _TILE_Y, reverse=True),
        own_BHI,
        grouping,
        batch,
        heads,
        heads // k_BGSD.shape[1],
        rows,
        q_start // grouping.step,
        scale,
    )


def _packed(x_BGSD: torch.Tensor, grouping: Grouping, multiple: int, *, reverse: bool) -> torch.Tensor:
    batch, heads, rows, dim = x_BGSD.shape
    check_head_dim(dim)
    padded = triton.cdiv(triton.cdiv(rows, grouping.step), multiple) * multiple
    small = x_BGSD.element_size() == 2
    dtype = torch.float8_e4m3fn if small else x_BGSD.dtype
    out_XF = torch.empty((batch * heads * padded, grouping.slots * dim), dtype=dtype, device=x_BGSD.device)
    _pack_kernel[(triton.cdiv(padded * grouping.slots, 64), batch * heads)](
        x_BGSD,
        out_XF,
        *x_BGSD.stride()[:3],
        heads,
        rows,
        padded,
        D=dim,
        STEP=grouping.step,
        SLOTS=grouping.slots,
        REVERSED=reverse,
        LIMIT=torch.finfo(dtype).max,
        ROWS=64,
        num_warps=4,
    )
    return out_XF


def log_sums(packed: Packed, first_row: int, blocks: int) -> torch.Tensor:
    """log2 of the sums of e^logit per query group and key block: fp16 part_BHNRM.

    For N = `blocks` query blocks from `first_row` of q on, R = groups per block; M covers the key blocks of
    the last of them.
    """
    grouping, lanes = packed.grouping, packed.batch * packed.heads
    per_block, width = grouping.per_block, packed.q_XF.shape[1]
    columns = packed.start // per_block + first_row + blocks
    part = empty_parts(packed.q_XF, (packed.batch, packed.heads, blocks, per_block), columns)
    per_load = min(width, 128 // packed.q_XF.element_size())
    own = packed.own_BHI
    _grouped_kernel[(lanes, triton.cdiv(blocks * per_block, _TILE_X))](
        TensorDescriptor.from_tensor(packed.q_XF, [_TILE_X, per_load]),
        TensorDescriptor.from_tensor(packed.k_XF, [_TILE_Y, per_load]),
        own,
        part,
        *part.stride()[:2],
        part.stride(3),
        packed.heads,
        packed.share,
        packed.rows,
        packed.q_XF.shape[0] // lanes,
        packed.k_XF.shape[0] // (lanes // packed.share),
        0 if own is None else own.shape[2],
        packed.start,
        first_row * per_block,
        (first_row + blocks) * per_block,
        packed.scale * LOG2_E,
        STEP=grouping.step,
        SLOTS=grouping.slots,
        PER_BLOCK=per_block,
        F=width,
        BF=per_load,
        X=_TILE_X,
        Y=_TILE_Y,
        STAGES=4,
        FLATTEN=True,
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
