"""Online-softmax attention for Hopper, in Gluon: the algorithm of `flash.py` with the roles split by warps.

One warp copies (TMA), two or three warpgroups compute 64 rows each. A warpgroup issues the scores of the
next tile and the weighted sum of the last one together (FlashAttention-3, section 3.2); while it takes
exponentials, the matrix unit works for the others. (Packed keys excepted, the assembler has it wait for its
own sum first, wherever the wait is written; what keeping it in its place gave: docs/LOG.md.)

The grid is persistent: one program per multiprocessor takes row tiles from a common counter, the tiles of a
key head's query heads side by side so that they share keys in L2, longest first so that the programs end
together.

RANGE, LIST and PACKED as in `flash.py`; masked tiles come first in a row's list.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_tiles import extent_of, load_items, next_entry, place_of

NEGATIVE = gl.constexpr(-1.0e30)
"""A row's largest score before its first tile; finite for the reason given in `flash.py`."""
UNSEEN = gl.constexpr(-3.0e38)
"""Score of an unseen key, far below NEGATIVE. With equal scores, a row that sees nothing of its first tile
would have m = s * scale rounded, s * scale - m not: exp2 of what the rounding left may be infinite."""


@gluon.constexpr_function
def _early(mode: int, dim: int) -> bool:
    """Whether p is rounded and acc shrunk after the next scores' issue, while the matrix unit works on them.

    This gains 3% in the long loops of D 128 and loses 4% in lists and 8% at D 64.
    """
    return mode == 2 or (mode == 0 and dim == 128)


@gluon.jit
def _weigh(s, m, mass, scale, weight, WEIGHTED: gl.constexpr):
    """Exponentials p of one tile's products s; the new m and mass; what shrinks the sums so far."""
    top = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - top[:, None])
    shrink = gl.exp2(m - top)
    counted = p * weight[None, :] if WEIGHTED else p
    return p, top, mass * shrink + gl.sum(counted, 1), shrink


@gluon.jit
def _advance(
    acc, m, mass, p, shrink, done, i, fixed,
    KIND: gl.constexpr, MODE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of tile i while tile i - 1, whose exponentials are p, is summed.

    KIND 0: all keys are seen, 1: causal, 2: packed, 3: packed and the last, 4: causal in a branch.
    """
    q, position, limits, scale, buffers = fixed
    q_smem, k_smem, v_smem, w_smem, _q_full, _q_empty, k_full, k_empty, v_full, v_empty = buffers
    whole, exact, packed = limits
    EARLY: gl.constexpr = _early(MODE, D)
    dtype: gl.constexpr = q_smem.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, D], dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, s_layout))
    blank = gl.zeros([64, 128], gl.float32, layout=s_layout)
    next_stage = (done + 1) % STAGES
    mbarrier.wait(k_full.index(next_stage), ((done + 1) // STAGES) & 1)
    k = k_smem.index(next_stage)._reinterpret(dtype, [128, D], flat)
    s = warpgroup_mma(q, k.permute([1, 0]), blank, use_acc=False, is_async=True)
    stage = done % STAGES
    mbarrier.wait(v_full.index(stage), (done // STAGES) & 1)
    v = v_smem.index(stage)._reinterpret(dtype, [128, D], flat)
    if EARLY:
        w = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    else:
        w = p
    acc = warpgroup_mma(w, v, acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    weight = scale
    if (KIND == 2) | (KIND == 3):
        line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        weight = w_smem.index(next_stage)._reinterpret(gl.float32, [128], line).load(column.type.layout)
    else:
        mbarrier.arrive(k_empty.index(next_stage))
    if KIND == 1:
        s = gl.where((whole + i) * 128 + column[None, :] <= position[:, None], s, UNSEEN)
    if KIND == 4:  # noqa: SIM102 (KIND is known when compiling, i is not)
        if i < exact - whole:
            s = gl.where((whole + i) * 128 + column[None, :] <= position[:, None], s, UNSEEN)
    if KIND == 3:
        s = gl.where(((i - exact) * 128 + column < packed)[None, :], s, UNSEEN)
    p, m, mass, shrink = _weigh(s, m, mass, scale, weight, (KIND == 2) | (KIND == 3))
    if (KIND == 2) | (KIND == 3):
        mbarrier.arrive(k_empty.index(next_stage))  # its stage holds the tile's run lengths too
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage))
    if not EARLY:
        p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, m, mass, p, shrink, done + 1


@gluon.jit
def _advance_all(
    acc, m, mass, p, shrink, done, ends, fixed,
    MODE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`_advance` for every tile of an item but the first: where faster, in a loop for each kind of tile."""
    masked, exact, total = ends
    EARLY: gl.constexpr = _early(MODE, D)
    if MODE == 1:
        for i in range(1, exact):
            acc, m, mass, p, shrink, done = _advance(
                acc, m, mass, p, shrink, done, i, fixed, 0, MODE, D, STAGES
            )
    elif EARLY:
        for i in range(1, masked):
            acc, m, mass, p, shrink, done = _advance(
                acc, m, mass, p, shrink, done, i, fixed, 1, MODE, D, STAGES
            )
        for i in range(masked, exact):
            acc, m, mass, p, shrink, done = _advance(
                acc, m, mass, p, shrink, done, i, fixed, 0, MODE, D, STAGES
            )
    else:
        for i in range(1, exact):
            acc, m, mass, p, shrink, done = _advance(
                acc, m, mass, p, shrink, done, i, fixed, 4, MODE, D, STAGES
            )
    if MODE == 2:
        for i in range(exact, total - 1):
            acc, m, mass, p, shrink, done = _advance(
                acc, m, mass, p, shrink, done, i, fixed, 2, MODE, D, STAGES
            )
        for i in range(gl.maximum(exact, total - 1), total):
            acc, m, mass, p, shrink, done = _advance(
                acc, m, mass, p, shrink, done, i, fixed, 3, MODE, D, STAGES
            )
    return acc, m, mass, p, shrink, done


@gluon.jit
def _compute(  # noqa: PLR0915 (jitted: a helper for each step would only hide their order)
    half: gl.constexpr, results, buffers, work, turns,
    MODE: gl.constexpr, ORDER: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each item.

    With AHEAD 2, queries have two buffers. An item's output leaves by its own, which is freed when the next
    item, whose queries lie in the other, is under way.
    """
    out, out_lead, scale = results
    _, shape, spans, tables = work
    q_smem, k_smem, v_smem, _w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    dtype: gl.constexpr = q_smem.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, D], dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, s_layout))
    EARLY: gl.constexpr = _early(MODE, D)
    done = 0
    taken = 0
    entry = next_entry(taken, turns)
    while entry >= 0:
        at = place_of(entry, shape, ORDER)
        b, h, _, tile, lead, _ = at
        first, step, total, exact, masked, _, whole, packed = extent_of(
            at, shape, spans, tables, MODE, 64 * GROUPS
        )
        limits = (whole, exact, packed)
        position = first + step * (half * 64 + gl.arange(0, 64, layout=row_layout))
        m = gl.full([64], NEGATIVE, gl.float32, layout=row_layout)
        mass = gl.zeros([64], gl.float32, layout=row_layout)
        acc = gl.zeros([64, D], gl.float32, layout=o_layout)
        mine = half * AHEAD + taken % AHEAD
        mbarrier.wait(q_full.index(mine), (taken // AHEAD) & 1)
        q = q_smem.index(mine)._reinterpret(dtype, [64, D], flat)
        mbarrier.wait(k_full.index(done % STAGES), (done // STAGES) & 1)
        k = k_smem.index(done % STAGES)._reinterpret(dtype, [128, D], flat)
        blank = gl.zeros([64, 128], gl.float32, layout=s_layout)
        s = warpgroup_mma(q, k.permute([1, 0]), blank, use_acc=False, is_async=True)
        if AHEAD == 2:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(half * 2 + (taken + 1) % 2), pred=taken > 0)
        taken += 1
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(done % STAGES))
        s = gl.where(whole * 128 + column[None, :] <= position[:, None], s, UNSEEN)
        p, m, mass, shrink = _weigh(s, m, mass, scale, scale, False)
        if not EARLY:
            p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
        fixed = (q, position, limits, scale, buffers)
        acc, m, mass, p, shrink, done = _advance_all(
            acc, m, mass, p, shrink, done, (masked, exact, total), fixed, MODE, D, STAGES
        )
        mbarrier.wait(v_full.index(done % STAGES), (done // STAGES) & 1)
        v = v_smem.index(done % STAGES)._reinterpret(dtype, [128, D], flat)
        if EARLY:
            p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        acc = warpgroup_mma(p, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(done % STAGES))
        done += 1
        q.store((acc / gl.convert_layout(mass, gl.SliceLayout(1, o_layout))[:, None]).to(dtype))
        fence_async_shared()
        place = [b, h, (tile * GROUPS + half) * 64, 0]
        if lead:
            tma.async_copy_shared_to_global(out_lead, place, q_smem.index(mine))
        else:
            tma.async_copy_shared_to_global(out, place, q_smem.index(mine))
        if AHEAD == 1:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(half))
        entry = next_entry(taken, turns)
    tma.store_wait(0)


@gluon.jit
def hopper_kernel(
    q, k, v, out, q_lead, out_lead, packed_k, packed_v, weight, packed_ptr, index_ptr, order_ptr, counter_ptr,
    index_batch, index_head, index_row, items, batch, heads, group, tiles, lead_tiles,
    keys, row0, step, lead_row0, critical, chunk, chunk_slots, scale,
    MODE: gl.constexpr, ORDER: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, AHEAD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the three roles. Shapes and orders: `launch`."""
    q_smem = gl.allocate_shared_memory(q.dtype, [GROUPS * AHEAD, 1, 1, 64, D], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, 128, D], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, 128, D], v.layout)
    w_smem = v_smem
    if MODE == 2:
        w_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, 128], weight.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS * AHEAD, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS * AHEAD, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(GROUPS * AHEAD):
        mbarrier.init(q_full.index(buffer), count=1)
        mbarrier.init(q_empty.index(buffer), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    told = gl.allocate_shared_memory(gl.int64, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    told_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(2):
        mbarrier.init(told_full.index(turn), count=1)
        mbarrier.init(told_empty.index(turn), count=GROUPS)
    fence_async_shared()
    turns = (told, told_full, told_empty)
    buffers = (q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    shape = (batch, heads, group, tiles, lead_tiles)
    spans = (keys, row0, step, lead_row0, critical, chunk)
    tables = (packed_ptr, chunk_slots)
    index = (order_ptr, counter_ptr, index_ptr, index_batch, index_head, index_row)
    results = (out, out_lead, scale)
    sources = (q, k, v, q_lead, packed_k, packed_v, weight)
    work = (items, shape, spans, tables)
    # fmt: off
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (0, results, buffers, work, turns, MODE, ORDER, D, STAGES, GROUPS, AHEAD)),
                (_compute, (1, results, buffers, work, turns, MODE, ORDER, D, STAGES, GROUPS, AHEAD)),
                (load_items, (sources, index, buffers, work, turns, MODE, ORDER, STAGES, GROUPS, AHEAD)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (0, results, buffers, work, turns, MODE, ORDER, D, STAGES, GROUPS, AHEAD)),
                (_compute, (1, results, buffers, work, turns, MODE, ORDER, D, STAGES, GROUPS, AHEAD)),
                (_compute, (2, results, buffers, work, turns, MODE, ORDER, D, STAGES, GROUPS, AHEAD)),
                (load_items, (sources, index, buffers, work, turns, MODE, ORDER, STAGES, GROUPS, AHEAD)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
    # fmt: on
