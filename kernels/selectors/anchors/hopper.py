"""Sums anchor scores on Hopper, in Gluon: the computation of `scores.py` with the warp roles of
`attention/hopper/attention.py`.

Four consumer warpgroups take 64 query slots each. The kernel is bound by reads of shared memory
(docs/log/2026-11-22.md at 4fe709c6). The order of slots in `_by_block` and `_counts` reduces these reads.

Shape suffixes: X query slots of a warpgroup, Y key slots of a tile, W key blocks of a tile, S slots of a
block.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltafront.kernels.hopper.layouts import GROUP_ROWS, TILE, scores_layout
from deltafront.kernels.hopper.ring import Ring, barriers

_LOG2 = gl.constexpr("lg2.approx.ftz.f32 $0, $1;")
"""Approximates log2 within 2^-22; -inf for 0. That is enough for results stored in 16 bits."""
WARPGROUPS = gl.constexpr(4)


class Keys(NamedTuple):
    """Tables of key slots. k, count: TMA descriptors of `hopper_launch.key_tiles`. first_ptr: positions."""

    k: tma.tensor_descriptor
    count: tma.tensor_descriptor
    first_ptr: gl.tensor
    stride_b: gl.tensor
    stride_g: gl.tensor


class Queries(NamedTuple):
    """Pointers to tables of the chunk's query slots: vectors, first positions and row counts."""

    vector_ptr: gl.tensor
    first_ptr: gl.tensor
    count_ptr: gl.tensor


class Out(NamedTuple):
    ptr: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_n: gl.tensor
    stride_r: gl.tensor


class ScoreWork(NamedTuple):
    """Sizes of one launch. It scores slab_blocks query blocks of the chunk, from first_row_block on."""

    kv_heads: gl.tensor
    group: gl.tensor
    query_blocks: gl.tensor
    first_block: gl.tensor
    first_row_block: gl.tensor
    slab_blocks: gl.tensor
    scale: gl.tensor


class ScoreRows(NamedTuple):
    """A warpgroup's query slots, one value per slot in each field."""

    first: gl.tensor
    used: gl.tensor
    valid: gl.tensor
    out: gl.tensor
    highest: gl.tensor  # scalar: the last query block among these slots


class SlotBuffers(NamedTuple):
    """Shared memory.

    Attributes:
        q: Each warpgroup's 64 rows.
        k, counts: A tile's (1, 16, 4, 2, D) keys and (1, 8, 4, 4) counts, under one pair of barriers.
    """

    q: gl.shared_memory_descriptor
    k: Ring
    counts: gl.shared_memory_descriptor


@gluon.jit
def _diagonals(tile, units, work):
    first = work.first_block + work.first_row_block
    low = first + tile * units // work.group
    return low, first + gl.minimum((tile * units + units - 1) // work.group, work.slab_blocks - 1)


@gluon.jit
def _tiles(work, PLAN: gl.constexpr):
    tile = gl.num_programs(0) - 1 - gl.program_id(0)  # long rows first
    _, highest = _diagonals(tile, PLAN.units * WARPGROUPS, work)
    tiles = highest // PLAN.blocks + 1
    part = (tiles + gl.num_programs(2) - 1) // gl.num_programs(2)
    begin = part * gl.program_id(2)
    return tile, begin, gl.minimum(begin + part, tiles)


@gluon.jit
def _copy_keys(keys, buffers, work, PLAN: gl.constexpr):
    ring = buffers.k
    lane = gl.program_id(1)
    _, begin, end = _tiles(work, PLAN)
    for tile in range(begin, end):
        use = tile - begin
        ring.wait_empty(use)
        full = ring.when_full(use)
        mbarrier.expect(full, keys.k.block_type.nbytes + keys.count.block_type.nbytes)
        tma.async_copy_global_to_shared(keys.k, [lane, 0, tile * 4, 0, 0], full, ring.buffer(use))
        counts = buffers.counts.index(use % PLAN.stages)
        tma.async_copy_global_to_shared(keys.count, [lane, 0, tile * 4, 0], full, counts)


@gluon.jit
def _by_block(s_XY, PLAN: gl.constexpr):
    """Reshape (64, 128) products to (64, W, S). `key_tiles` orders a tile's slots so that each thread holds
    whole blocks of up to 32 slots."""
    s_XPTE = gl.reshape(s_XY, [GROUP_ROWS, 16, 4, 2])
    return gl.reshape(gl.permute(s_XPTE, [0, 2, 1, 3]), [GROUP_ROWS, PLAN.blocks, PLAN.k_slots])


@gluon.jit
def _counts(buffer, s_XWS, PLAN: gl.constexpr):
    """Load a tile's counts (W, S), each thread its part. A row's four threads read 64 adjacent bytes."""
    s_XUTV = gl.permute(gl.reshape(s_XWS, [GROUP_ROWS, 4, 8, 4]), [0, 2, 1, 3])
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    count_UTV = buffer._reinterpret(gl.float32, [8, 4, 4], lines).load(gl.SliceLayout(0, s_XUTV.type.layout))
    count_WS = gl.reshape(gl.permute(count_UTV, [1, 0, 2]), [PLAN.blocks, PLAN.k_slots])
    return gl.convert_layout(count_WS, gl.SliceLayout(0, s_XWS.type.layout), assert_trivial=True)


@gluon.jit
def _add_up(
    tile, use, q, buffers, rows, first_ptr, scale, DIAGONAL: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Store, for each query slot and each key block of one key tile, log2 of the sum of anchor weights.
    DIAGONAL: the tile needs a causal mask."""
    W: gl.constexpr = PLAN.blocks
    S: gl.constexpr = PLAN.k_slots
    ring = buffers.k
    ring.wait_full(use)
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, PLAN.dim], q.dtype)
    k = ring.buffer(use)._reinterpret(q.dtype, [TILE, PLAN.dim], flat)
    blank = gl.zeros([GROUP_ROWS, TILE], gl.float32, layout=scores_layout(q.dtype.primitive_bitwidth))
    s_XY = warpgroup_mma(q, k.permute([1, 0]), blank, use_acc=False, is_async=True)
    s_XY = warpgroup_mma_wait(0, deps=[s_XY])
    s_XWS = _by_block(s_XY, PLAN)
    per_key: gl.constexpr = gl.SliceLayout(0, s_XWS.type.layout)
    per_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, s_XWS.type.layout))
    weight_XWS = _counts(buffers.counts.index(use % PLAN.stages), s_XWS, PLAN)[None, :, :]
    if DIAGONAL:
        block_W = tile * W + gl.arange(0, W, layout=gl.SliceLayout(1, per_key))
        slot_S = gl.arange(0, S, layout=gl.SliceLayout(0, per_key))
        valid_WS = (block_W <= rows.highest)[:, None]
        offset_WS = (block_W * S)[:, None] + slot_S[None, :]
        first_WS = gl.load(first_ptr + offset_WS, mask=valid_WS, other=2147483647)
        position_X = gl.convert_layout(rows.first, per_row)
        position_XWS = gl.expand_dims(gl.expand_dims(position_X, 1), 2)
        seen_XWS = (position_XWS - first_WS[None, :, :] + 1).to(gl.float32)
        weight_XWS = gl.maximum(gl.minimum(seen_XWS, weight_XWS), 0.0)
        s_XWS = gl.where(first_WS[None, :, :] > position_XWS, float("-inf"), s_XWS)
    m_XW = gl.max(s_XWS, 2) * scale
    if DIAGONAL:
        m_XW = gl.where(m_XW == float("-inf"), 0.0, m_XW)
    l_XW = gl.sum(gl.exp2(s_XWS * scale - m_XW[:, :, None]) * weight_XWS, 2)
    ring.release_loaded(use)
    lse_XW = m_XW + gl.inline_asm_elementwise(_LOG2, "=f,f", [l_XW], gl.float32, True, 1)
    lse_XW = gl.where(gl.convert_layout(rows.used, per_row)[:, None], lse_XW, float("-inf"))
    block_W = tile * W + gl.arange(0, W, layout=gl.SliceLayout(0, lse_XW.type.layout))
    valid_XW = gl.convert_layout(rows.valid, per_row)[:, None]
    if DIAGONAL:
        valid_XW = valid_XW & (block_W <= rows.highest)[None, :]
    out_X = gl.convert_layout(rows.out, per_row)
    gl.store(out_X[:, None] + block_W[None, :], gl.minimum(lse_XW, 60000.0).to(gl.float16), mask=valid_XW)


@gluon.jit
def _table(row_X, tile, batch, kv_head, work, PLAN: gl.constexpr):
    unit_X = tile * PLAN.units + row_X // PLAN.q_slots
    block_X = unit_X // work.group
    head_X = kv_head * work.group + unit_X % work.group
    slot_X = (
        (batch * work.kv_heads * work.group + head_X) * work.query_blocks + work.first_row_block + block_X
    )
    return slot_X * PLAN.q_slots + row_X % PLAN.q_slots, (block_X, head_X), block_X < work.slab_blocks


@gluon.jit
def _score_rows(WARPGROUP: gl.constexpr, queries, keys, out, buffers, work, PLAN: gl.constexpr):
    """Run a consumer warpgroup: score 64 query slots, by block and head, against the program's key tiles."""
    tile, begin, end = _tiles(work, PLAN)
    tile = tile * WARPGROUPS + WARPGROUP
    batch = (gl.program_id(1) // work.kv_heads).to(gl.int64)
    kv_head = (gl.program_id(1) % work.kv_heads).to(gl.int64)
    lowest, highest = _diagonals(tile, PLAN.units, work)

    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // PLAN.dim, PLAN.dim // 8], [4, 1], [1, 0])
    row_X = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, copied))
    table_X, _, valid_X = _table(row_X, tile, batch, kv_head, work, PLAN)
    column_D = gl.arange(0, PLAN.dim, layout=gl.SliceLayout(0, copied))
    at_XD = table_X[:, None] * PLAN.dim + column_D[None, :]
    q = buffers.q.index(WARPGROUP)
    q.store(gl.load(queries.vector_ptr + at_XD, mask=valid_X[:, None], other=0.0))
    fence_async_shared()

    row_X = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, scores_layout(q.dtype.primitive_bitwidth)))
    table_X, place_X, valid_X = _table(row_X, tile, batch, kv_head, work, PLAN)
    block_X, head_X = place_X
    rows = ScoreRows(
        gl.load(queries.first_ptr + table_X, mask=valid_X, other=-1),
        gl.load(queries.count_ptr + table_X, mask=valid_X, other=0.0) > 0.0,
        valid_X,
        out.ptr + batch * out.stride_b + head_X * out.stride_h + block_X * out.stride_n
        + row_X % PLAN.q_slots * out.stride_r,
        highest,
    )  # fmt: skip
    first_ptr = keys.first_ptr + batch * keys.stride_b + kv_head * keys.stride_g
    clear_end = gl.minimum(gl.maximum(lowest // PLAN.blocks, begin), end)
    for i in range(begin, clear_end):
        _add_up(i, i - begin, q, buffers, rows, first_ptr, work.scale, DIAGONAL=False, PLAN=PLAN)
    for i in range(clear_end, end):
        _add_up(i, i - begin, q, buffers, rows, first_ptr, work.scale, DIAGONAL=True, PLAN=PLAN)


@gluon.jit(do_not_specialize=["query_blocks", "first_block", "first_row_block", "slab_blocks"])
def anchors_hopper_kernel(
    k, count, k_first_ptr, q_ptr, q_first_ptr, q_count_ptr, out_ptr,
    stride_tb, stride_tg, stride_ob, stride_oh, stride_on, stride_or,
    kv_heads, group, query_blocks, first_block, first_row_block, slab_blocks, scale,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Score a tile of query slots against the key tiles of this program's split."""
    STAGES: gl.constexpr = PLAN.stages
    keys = Keys(k, count, k_first_ptr, stride_tb, stride_tg)
    queries = Queries(q_ptr, q_first_ptr, q_count_ptr)
    out = Out(out_ptr, stride_ob, stride_oh, stride_on, stride_or)
    work = ScoreWork(kv_heads, group, query_blocks, first_block, first_row_block, slab_blocks, scale)
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP_ROWS, PLAN.dim], k.dtype)
    q_smem = gl.allocate_shared_memory(k.dtype, [WARPGROUPS, GROUP_ROWS, PLAN.dim], flat)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 16, 4, 2, PLAN.dim], k.layout)
    counts = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 8, 4, 4], count.layout)
    full, empty = barriers(STAGES), barriers(STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=WARPGROUPS)
    fence_async_shared()
    buffers = SlotBuffers(q_smem, Ring(k_smem, full, empty, STAGES), counts)
    # fmt: off
    gl.warp_specialize(
        [
            (_score_rows, (0, queries, keys, out, buffers, work, PLAN)),
            (_score_rows, (1, queries, keys, out, buffers, work, PLAN)),
            (_score_rows, (2, queries, keys, out, buffers, work, PLAN)),
            (_score_rows, (3, queries, keys, out, buffers, work, PLAN)),
            (_copy_keys, (keys, buffers, work, PLAN)),
        ],
        [4, 4, 4, 1],
        [PLAN.registers, PLAN.registers, PLAN.registers, 24],
    )
    # fmt: on
