"""Sums each tile's anchor scores, on the GPU.

Shape suffixes: X query slots of a kernel's tile, from several heads and blocks; Y its key slots; W its key
blocks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from deltafront.kernels.constants import BLOCK, LOG2E
from deltafront.kernels.hopper.host import is_hopper
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.launches import strides
from deltafront.kernels.selectors.anchors import hopper_launch
from deltafront.kernels.selectors.anchors.form import AnchorSettings, BlockAnchors
from deltafront.kernels.selectors.rules.kernel import fast_log2, in_16_bits
from deltafront.kernels.selectors.rules.sums import Sums, empty_parts

_TILE = BLOCK
_PROGRAMS = 528
"""Target number of programs: four for each multiprocessor of an H200. If there are fewer query tiles, the key
blocks of each are divided among several programs."""
_LEAST_STEPS = 8
"""Minimum number of key tiles per program."""


@triton.jit(do_not_specialize=["query_blocks", "first_block", "first_row_block", "slab_blocks"])
def _score_kernel(
    q_ptr, q_first_ptr, q_count_ptr, k_ptr, k_first_ptr, k_count_ptr, out_ptr, stride_kb, stride_kg,
    stride_tb, stride_tg, stride_ob, stride_oh, stride_on, stride_or, kv_heads, group, query_blocks,
    first_block, first_row_block, slab_blocks, scale_log2,
    D: tl.constexpr, Q_SLOTS: tl.constexpr, K_SLOTS: tl.constexpr, X: tl.constexpr, W: tl.constexpr,
    DIAGONAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Score a tile of query slots. Without DIAGONAL take the key blocks before the tile's first diagonal;
    with DIAGONAL take the remaining key blocks, which need a causal mask and more registers.

    A unit is one query head of one query block, with Q_SLOTS rows. A tile holds units of one key head,
    ordered by block. The slab is query blocks first_row_block .. first_row_block + slab_blocks - 1. The third
    axis of the grid splits the key blocks.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # long rows first
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    PER_TILE: tl.constexpr = X // Q_SLOTS
    Y: tl.constexpr = W * K_SLOTS
    row_X = tl.arange(0, X)
    unit_X = tile * PER_TILE + row_X // Q_SLOTS
    block_X = unit_X // group
    head_X = kv_head * group + unit_X % group
    valid_X = block_X < slab_blocks
    table_X = (
        (batch * kv_heads * group + head_X) * query_blocks + first_row_block + block_X
    ) * Q_SLOTS + row_X % Q_SLOTS
    column_D = tl.arange(0, D)
    q_XD = tl.load(q_ptr + table_X[:, None] * D + column_D[None, :], mask=valid_X[:, None], other=0.0)
    q_first_X = tl.load(q_first_ptr + table_X, mask=valid_X, other=-1)
    used_X = tl.load(q_count_ptr + table_X, mask=valid_X, other=0.0) > 0.0
    lowest = first_block + first_row_block + tile * PER_TILE // group
    highest = (
        first_block + first_row_block + tl.minimum((tile * PER_TILE + PER_TILE - 1) // group, slab_blocks - 1)
    )

    column_Y = tl.arange(0, Y)
    k_ptr += batch * stride_kb + kv_head * stride_kg
    k_first_ptr += batch * stride_tb + kv_head * stride_tg
    k_count_ptr += batch * stride_tb + kv_head * stride_tg
    block_W = tl.arange(0, W)
    out_X = (
        out_ptr + batch * stride_ob + head_X * stride_oh + block_X * stride_on + row_X % Q_SLOTS * stride_or
    )
    past = lowest // W * W
    part = tl.cdiv(past // W, tl.num_programs(2)) * W
    begin = past if DIAGONAL else part * tl.program_id(2)
    end = highest + 1 if DIAGONAL else tl.minimum(begin + part, past)
    for block in tl.range(begin, end, W, num_stages=STAGES):
        place = block * K_SLOTS
        if DIAGONAL:
            valid_Y = block + column_Y // K_SLOTS <= highest
            k_YD = tl.load(
                k_ptr + (place + column_Y[:, None]).to(tl.int64) * D + column_D[None, :],
                mask=valid_Y[:, None],
                other=0.0,
            )
            count_Y = tl.load(k_count_ptr + place + column_Y, mask=valid_Y, other=0.0)
            first_Y = tl.load(k_first_ptr + place + column_Y, mask=valid_Y, other=0)
            seen_XY = (q_first_X[:, None] - first_Y[None, :] + 1).to(tl.float32)
            weight_XY = tl.maximum(tl.minimum(seen_XY, count_Y[None, :]), 0.0)
            masked_XY = (first_Y[None, :] > q_first_X[:, None]) | (valid_Y[None, :] == 0)
        else:
            k_YD = tl.load(k_ptr + (place + column_Y[:, None]).to(tl.int64) * D + column_D[None, :])
            weight_XY = tl.load(k_count_ptr + place + column_Y)[None, :]
        score_XY = tl.dot(q_XD, tl.trans(k_YD), input_precision="ieee")
        if DIAGONAL:
            score_XY = tl.where(masked_XY, float("-inf"), score_XY)
        score_XWA = tl.reshape(score_XY, (X, W, K_SLOTS))
        m_XW = tl.max(score_XWA, axis=2)
        base_XW = tl.where(m_XW == float("-inf"), 0.0, m_XW * scale_log2)
        p_XY = tl.reshape(tl.exp2(score_XWA * scale_log2 - base_XW[:, :, None]), (X, Y)) * weight_XY
        lse_XW = base_XW + fast_log2(tl.sum(tl.reshape(p_XY, (X, W, K_SLOTS)), axis=2))
        lse_XW = tl.where(used_X[:, None], lse_XW, float("-inf"))
        tl.store(
            out_X[:, None] + (block + block_W[None, :]),
            in_16_bits(lse_XW),
            mask=valid_X[:, None] & (block + block_W[None, :] <= highest),
        )


def score_sums(
    x: AttentionInput,
    queries: BlockAnchors,
    keys: BlockAnchors,
    form: AnchorSettings,
    first_row: int,
    blocks: int,
) -> Sums:
    """Compute the log2 sums of anchor scores (`Sums`) for `blocks` query blocks from `first_row` on, with one
    row per query slot."""
    batch, heads = x.q_BHTD.shape[:2]
    kv_heads, dim = x.k_BGSD.shape[1], x.q_BHTD.shape[3]
    columns = x.first_block + first_row + blocks
    part = empty_parts(x.q_BHTD, (batch, heads, blocks, form.q.cap), columns)
    sums = Sums(part, first_row)
    if takes_hopper(x.q_BHTD.device, x.q_BHTD.dtype, dim):
        hopper_launch.launch(x, queries, keys, form, sums)
        return sums
    tiles = triton.cdiv(blocks * x.group * form.q.cap, _TILE)
    steps = columns * form.k.cap // _TILE
    splits = max(1, min(_PROGRAMS // (tiles * batch * kv_heads), steps // _LEAST_STEPS))
    query_tables = (queries.vector_BGMAD, queries.first_BGMA, queries.count_BGMA)
    key_tables = (keys.vector_BGMAD, keys.first_BGMA, keys.count_BGMA)
    table_strides = (*strides(keys.vector_BGMAD, keys.count_BGMA, dims=2), *strides(part, dims=4))
    sizes = (kv_heads, x.group, x.query_blocks, x.first_block, first_row, blocks)
    for diagonal in (False, True):
        _score_kernel[(tiles, batch * kv_heads, 1 if diagonal else splits)](
            *query_tables,
            *key_tables,
            part,
            *table_strides,
            *sizes,
            x.scale * LOG2E,
            D=dim,
            Q_SLOTS=form.q.cap,
            K_SLOTS=form.k.cap,
            X=_TILE,
            W=_TILE // form.k.cap,
            DIAGONAL=diagonal,
            STAGES=1 if diagonal else 2,
            num_warps=8,
            maxnreg=None if diagonal else 128,
        )
    return sums


def takes_hopper(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Say whether the Hopper kernel supports these inputs: a Hopper GPU, a 16-bit dtype, D 64 or 128."""
    if device.type != "cuda" or not is_hopper(device) or dtype == torch.float32:
        return False
    return head_dim in (64, 128)
