"""The anchor selector on the GPU: summaries of blocks and sums of their scores. Shape suffixes as in
`table.py`; X rows of a query tile (a, of several heads and blocks), Y columns of a key tile (b, of several
blocks), W key blocks of a key tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...anchors.kernel import check_head_dim, next_far, orbit
from ...interface import BLOCK, AttentionInput
from ..rules.kernel import LOG2_E, Sums, empty_parts
from .table import AnchorSettings, BlockAnchors, SideSettings

_TILE = 128


@triton.jit
def _summarise_kernel(
    x_ptr,
    vector_ptr,
    first_ptr,
    count_ptr,
    stride_xb,
    stride_xg,
    stride_xs,
    stride_vb,
    stride_vg,
    stride_ab,
    stride_ag,
    groups,
    rows,
    first_block,
    cos,
    D: tl.constexpr,
    CAP: tl.constexpr,
    SLOTS: tl.constexpr,
    MEAN: tl.constexpr,
    MERGE: tl.constexpr,
):
    """One block: scan it, then fill its slots. first_block is where x lies in the prompt."""
    block = tl.program_id(0)
    batch = tl.program_id(1) // groups
    group = tl.program_id(1) % groups
    x_ptr += batch.to(tl.int64) * stride_xb + group.to(tl.int64) * stride_xg
    row_R = tl.arange(0, 128)
    column_D = tl.arange(0, D)
    start = block * 128
    held_rows = tl.minimum(rows - start, 128)
    real_R = row_R < held_rows
    x_RD = tl.load(
        x_ptr + (start + row_R[:, None]).to(tl.int64) * stride_xs + column_D[None, :],
        mask=real_R[:, None],
        other=0.0,
    )
    wide_RD = x_RD.to(tl.float32)
    square_R = tl.sum(wide_RD * wide_RD, axis=1)
    lead_R, _last = orbit(next_far(x_RD, square_R, held_rows, cos, 0), 0)

    runs = tl.sum(lead_R, axis=0)
    run_R = tl.cumsum(lead_R, axis=0) - 1
    crowded = runs > CAP
    slot_R = tl.where(crowded, ((run_R + 1) * CAP - 1) // runs, run_R)
    picked_R = (slot_R * runs // CAP == run_R) | (runs <= CAP)
    member_R = real_R & (picked_R | MERGE)
    leader_R = (lead_R > 0) & picked_R

    slot_A = tl.arange(0, SLOTS)
    mine_AR = slot_A[:, None] == slot_R[None, :]
    member_AR = mine_AR & member_R[None, :]
    leader_AR = mine_AR & leader_R[None, :]
    held_AR = member_AR if MEAN else leader_AR
    total_AD = tl.dot(held_AR.to(x_RD.dtype), x_RD, input_precision="ieee")
    share_A = 1.0 / tl.maximum(tl.sum(held_AR.to(tl.float32), axis=1), 1.0)
    count_A = tl.sum(member_AR.to(tl.int32), axis=1)
    first_A = tl.sum(tl.where(leader_AR, row_R[None, :], 0), axis=1) + (first_block + block) * 128

    fits_A = slot_A < CAP
    place = block.to(tl.int64) * CAP
    table = batch.to(tl.int64) * stride_ab + group.to(tl.int64) * stride_ag + place
    tl.store(first_ptr + table + slot_A, first_A, mask=fits_A)
    tl.store(count_ptr + table + slot_A, count_A, mask=fits_A)
    vector_ptr += batch.to(tl.int64) * stride_vb + group.to(tl.int64) * stride_vg + place * D
    vector_AD = (total_AD * share_A[:, None]).to(vector_ptr.dtype.element_ty)
    tl.store(vector_ptr + slot_A[:, None] * D + column_D[None, :], vector_AD, mask=fits_A[:, None])


@triton.jit
def _log_sums(score_XY, bias_XY, X: tl.constexpr, W: tl.constexpr, SLOTS: tl.constexpr):
    """log2 of the sum of 2^(score + bias) over the slots of each key block: (X, W); -inf where empty."""
    score_XWA = tl.reshape(score_XY + bias_XY, (X, W, SLOTS))
    top_XW = tl.max(score_XWA, axis=2)
    base_XW = tl.where(top_XW == float("-inf"), 0.0, top_XW)
    return base_XW + tl.log2(tl.sum(tl.exp2(score_XWA - base_XW[:, :, None]), axis=2))


@triton.jit
def _score_kernel(
    q_ptr,
    q_first_ptr,
    q_count_ptr,
    k_ptr,
    k_first_ptr,
    k_count_ptr,
    out_ptr,
    stride_kb,
    stride_kg,
    stride_tb,
    stride_tg,
    stride_ob,
    stride_oh,
    stride_on,
    stride_or,
    groups,
    share,
    query_blocks,
    first_block,
    first_row_block,
    slab_blocks,
    scale_log2,
    D: tl.constexpr,
    Q_SLOTS: tl.constexpr,
    K_SLOTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    X: tl.constexpr,
    W: tl.constexpr,
):
    """One tile of query slots against all key blocks they may see.

    The units (query block, head of the group) of one key head fill the tile, Q_SLOTS rows each, ordered by
    block, so that a tile needs the keys of few diagonals. The slab is query blocks first_row_block ..
    + slab_blocks of the chunk's tables.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # long rows first
    batch = (tl.program_id(1) // groups).to(tl.int64)
    group = (tl.program_id(1) % groups).to(tl.int64)
    PER_TILE: tl.constexpr = X // Q_SLOTS
    Y: tl.constexpr = W * K_SLOTS
    row_X = tl.arange(0, X)
    unit_X = tile * PER_TILE + row_X // Q_SLOTS
    block_X = unit_X // share
    head_X = group * share + unit_X % share
    real_X = block_X < slab_blocks
    table_X = (
        (batch * groups * share + head_X) * query_blocks + first_row_block + block_X
    ) * Q_SLOTS + row_X % Q_SLOTS
    column_D = tl.arange(0, D)
    q_XD = tl.load(q_ptr + table_X[:, None] * D + column_D[None, :], mask=real_X[:, None], other=0.0)
    q_first_X = tl.load(q_first_ptr + table_X, mask=real_X, other=-1)
    used_X = tl.load(q_count_ptr + table_X, mask=real_X, other=0) > 0
    lowest = first_block + first_row_block + tile * PER_TILE // share
    highest = (
        first_block + first_row_block + tl.minimum((tile * PER_TILE + PER_TILE - 1) // share, slab_blocks - 1)
    )

    column_Y = tl.arange(0, Y)
    k_ptr += batch * stride_kb + group * stride_kg
    k_first_ptr += batch * stride_tb + group * stride_tg
    k_count_ptr += batch * stride_tb + group * stride_tg
    block_W = tl.arange(0, W)
    out_X = (
        out_ptr + batch * stride_ob + head_X * stride_oh + block_X * stride_on + row_X % Q_SLOTS * stride_or
    )
    past = lowest // W * W
    for block in range(0, past, W):
        place = block * K_SLOTS
        k_YD = tl.load(k_ptr + (place + column_Y[:, None]).to(tl.int64) * D + column_D[None, :])
        count_Y = tl.load(k_count_ptr + place + column_Y).to(tl.float32)
        bias_Y = tl.log2(count_Y if WEIGHTED else tl.minimum(count_Y, 1.0))
        score_XY = tl.dot(q_XD, tl.trans(k_YD), input_precision="ieee") * scale_log2
        sums_XW = _log_sums(score_XY, bias_Y[None, :], X, W, K_SLOTS)
        sums_XW = tl.where(used_X[:, None], sums_XW, float("-inf"))
        tl.store(
            out_X[:, None] + (block + block_W[None, :]),
            sums_XW.to(out_ptr.dtype.element_ty),
            mask=real_X[:, None],
        )
    for block in range(past, highest + 1, W):
        place = block * K_SLOTS
        held_Y = block + column_Y // K_SLOTS <= highest
        k_YD = tl.load(
            k_ptr + (place + column_Y[:, None]).to(tl.int64) * D + column_D[None, :],
            mask=held_Y[:, None],
            other=0.0,
        )
        count_Y = tl.load(k_count_ptr + place + column_Y, mask=held_Y, other=0)
        first_Y = tl.load(k_first_ptr + place + column_Y, mask=held_Y, other=0)
        seen_XY = tl.minimum(q_first_X[:, None] - first_Y[None, :] + 1, count_Y[None, :])
        seen_XY = tl.maximum(seen_XY, 0).to(tl.float32)
        bias_XY = tl.log2(seen_XY if WEIGHTED else tl.minimum(seen_XY, 1.0))
        score_XY = tl.dot(q_XD, tl.trans(k_YD), input_precision="ieee") * scale_log2
        sums_XW = _log_sums(score_XY, bias_XY, X, W, K_SLOTS)
        sums_XW = tl.where(used_X[:, None], sums_XW, float("-inf"))
        tl.store(
            out_X[:, None] + (block + block_W[None, :]),
            sums_XW.to(out_ptr.dtype.element_ty),
            mask=real_X[:, None] & (block + block_W[None, :] <= highest),
        )


def empty_table(x_BGSD: torch.Tensor, cap: int) -> BlockAnchors:
    """Unfilled slots for every block of x, vectors in x's dtype."""
    shape = (*x_BGSD.shape[:2], -(-x_BGSD.shape[2] // BLOCK), cap)
    device = x_BGSD.device
    return BlockAnchors(
        torch.empty((*shape, x_BGSD.shape[3]), dtype=x_BGSD.dtype, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
    )


def summarise(
    x_BGSD: torch.Tensor, cos: float, side: SideSettings, table: BlockAnchors, place: int, first_block: int
) -> None:
    """Write the slots of every block of x into table[place ..]; x begins at block `first_block`."""
    batch, groups, rows, dim = x_BGSD.shape
    check_head_dim(dim)
    vector, count = table.vector_BGMAD[:, :, place:], table.count_BGMA[:, :, place:]
    _summarise_kernel[(-(-rows // BLOCK), batch * groups)](
        x_BGSD,
        vector,
        table.first_BGMA[:, :, place:],
        count,
        *x_BGSD.stride()[:3],
        *vector.stride()[:2],
        *count.stride()[:2],
        groups,
        rows,
        first_block,
        cos,
        D=dim,
        CAP=side.cap,
        SLOTS=max(16, side.cap),
        MEAN=side.representative == "mean",
        MERGE=side.overflow == "merge",
        num_warps=4,
    )


def score_sums(
    x: AttentionInput,
    queries: BlockAnchors,
    keys: BlockAnchors,
    form: AnchorSettings,
    first_row: int,
    blocks: int,
) -> Sums:
    """The log2 sums of query blocks first_row .. first_row + blocks - 1 of the chunk, a row a query slot."""
    batch, heads = x.q_BHTD.shape[:2]
    groups, dim = x.k_BGSD.shape[1], x.q_BHTD.shape[3]
    part = empty_parts(x.q_BHTD, (batch, heads, blocks, form.q.cap), x.first_block + first_row + blocks)
    _score_kernel[(triton.cdiv(blocks * x.group * form.q.cap, _TILE), batch * groups)](
        queries.vector_BGMAD,
        queries.first_BGMA,
        queries.count_BGMA,
        keys.vector_BGMAD,
        keys.first_BGMA,
        keys.count_BGMA,
        part,
        *keys.vector_BGMAD.stride()[:2],
        *keys.count_BGMA.stride()[:2],
        *part.stride()[:4],
        groups,
        x.group,
        x.query_blocks,
        x.first_block,
        first_row,
        blocks,
        x.scale * LOG2_E,
        D=dim,
        Q_SLOTS=form.q.cap,
        K_SLOTS=form.k.cap,
        WEIGHTED=form.weighted,
        X=_TILE,
        W=_TILE // form.k.cap,
        num_warps=8,
        num_stages=3,
    )
    return Sums(part, first_row, form.row_normalised)
