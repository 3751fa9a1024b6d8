"""Online-softmax attention for Hopper, in Gluon: the algorithm of `flash.py` with the roles split by warps.

One warp copies (TMA), two or three warpgroups compute 64 rows each. A warpgroup issues the scores of the
next tile and the weighted sum of the last one together (FlashAttention-3, section 3.2), waits for both (but
see `is_late`), and takes exponentials while the matrix unit works for the others.

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

from .hopper_softmax import (
    NEGATIVE,
    hide,
    in_pairs,
    is_late,
    is_spread,
    operand,
    rounded,
    shrunk,
    weigh,
)
from .hopper_tiles import extent_of, load_items, next_entry, packed_before, place_of


@gluon.jit
def _advance(
    acc, m, mass, w, shrink, done, i, fixed,
    KIND: gl.constexpr, MODE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of tile i while tile i - 1, whose exponentials are w (rounded, unless `is_late`), is summed.

    KIND 0: all keys are seen, 1: not all, 2: packed, all seen, 3: packed, not all, 4: found out in a branch.
    """
    q, seen, scale, buffers = fixed
    _position, _whole, masked, _exact, _begin, _key_from, _packed = seen
    q_smem, k_smem, v_smem, w_smem, _q_full, _q_empty, k_full, k_empty, v_full, v_empty = buffers
    PAIRS: gl.constexpr = in_pairs(MODE, D)
    LATE: gl.constexpr = is_late(MODE, D)
    WEIGHTED: gl.constexpr = (KIND == 2) | (KIND == 3)
    o_layout: gl.constexpr = acc.type.layout
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
    if LATE:
        acc = shrunk(acc, shrink)
        w = rounded(w, dtype, o_layout, PAIRS)
    acc = warpgroup_mma(operand(w, dtype, o_layout, PAIRS), v, acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    if not WEIGHTED:
        mbarrier.arrive(k_empty.index(next_stage))
    if not LATE:
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(stage))
    if (KIND == 1) | (KIND == 3):
        s = hide(s, column, i, seen, MODE, WEIGHTED)
    if KIND == 4:  # noqa: SIM102 (KIND is known when compiling, i is not)
        if i < masked:
            s = hide(s, column, i, seen, MODE, WEIGHTED)
    weight = scale
    if WEIGHTED:
        line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        weight = w_smem.index(next_stage)._reinterpret(gl.float32, [128], line).load(column.type.layout)
    p, m, mass, shrink = weigh(s, m, mass, scale, weight, WEIGHTED)
    if WEIGHTED:
        mbarrier.arrive(k_empty.index(next_stage))  # its stage holds the tile's run lengths too
    w = p
    if LATE:
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(stage))
    else:
        w = rounded(p, dtype, o_layout, PAIRS)
        acc = shrunk(acc, shrink)
    return acc, m, mass, w, shrink, done + 1


@gluon.jit
def _advance_all(
    acc, m, mass, w, shrink, done, ends, fixed,
    MODE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """`_advance` for every tile of an item but the first: where faster, in a loop for each kind of tile.

    ends: the first tile of which all rows see all keys; (PACKED) the first packed one of which they do not;
    the end. PACKED weighs exact keys by ones, for one loop less.
    """
    hidden, clear, total = ends
    if MODE == 2:
        if GROUPS == 3:  # else an item's rows lie in one block, and only the first tile has unseen keys
            for i in range(1, hidden):
                acc, m, mass, w, shrink, done = _advance(
                    acc, m, mass, w, shrink, done, i, fixed, 1, MODE, D, STAGES
                )
        for i in range(hidden if GROUPS == 3 else 1, clear):
            acc, m, mass, w, shrink, done = _advance(
                acc, m, mass, w, shrink, done, i, fixed, 2, MODE, D, STAGES
            )
        for i in range(clear, total):
            acc, m, mass, w, shrink, done = _advance(
                acc, m, mass, w, shrink, done, i, fixed, 3, MODE, D, STAGES
            )
    elif MODE == 0 and in_pairs(MODE, D):
        for i in range(1, hidden):
            acc, m, mass, w, shrink, done = _advance(
                acc, m, mass, w, shrink, done, i, fixed, 1, MODE, D, STAGES
            )
        for i in range(hidden, total):
            acc, m, mass, w, shrink, done = _advance(
                acc, m, mass, w, shrink, done, i, fixed, 0, MODE, D, STAGES
            )
    else:
        for i in range(1, total):
            acc, m, mass, w, shrink, done = _advance(
                acc, m, mass, w, shrink, done, i, fixed, 0 if MODE == 1 else 4, MODE, D, STAGES
            )
    return acc, m, mass, w, shrink, done


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
    PAIRS: gl.constexpr = in_pairs(MODE, D)
    LATE: gl.constexpr = is_late(MODE, D)
    SPREAD: gl.constexpr = is_spread(MODE, D)
    done = 0
    taken = 0
    entry = next_entry(taken, turns)
    while entry >= 0:
        at = place_of(entry, shape, ORDER)
        b, h, _, tile, lead, _ = at
        first, step, total, exact, masked, begin, whole, _most = extent_of(
            at, shape, spans, tables, MODE, 64 * GROUPS
        )
        position = first + step * (half * 64 + gl.arange(0, 64, layout=row_layout))
        hidden = masked
        clear = total
        key_from = 0
        packed = 0
        if MODE == 2:
            row = gl.minimum(first + half * 64, spans[0] - 1)
            key_from, packed = packed_before(row, at, shape, spans, tables)
            hidden = gl.minimum(masked + key_from // 128 - begin, exact)
            clear = exact + packed // 128
        seen = (position, whole, masked, exact, begin, key_from, packed)
        m = gl.full([64], NEGATIVE, gl.float32, layout=row_layout)
        if SPREAD:
            spread: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
            mass = gl.zeros([64, 8], gl.float32, layout=spread)
        else:
            mass = gl.zeros([64], gl.float32, layout=row_layout)
        acc = gl.zeros([64, D], gl.float32, layout=o_layout)
        mine = half * AHEAD + taken % AHEAD
        mbarrier.wait(q_full.index(mine), (taken // AHEAD) & 1)
        q_rows = q_smem.index(mine)._reinterpret(dtype, [64, D], flat)
        q = q_rows.load(gl.DotOperandLayout(0, s_layout, 2)) if MODE == 1 else q_rows  # where registers allow
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
        s = hide(s, column, 0, seen, MODE, False)
        w, m, mass, shrink = weigh(s, m, mass, scale, scale, False)
        if not LATE:
            w = rounded(w, dtype, o_layout, PAIRS)
        fixed = (q, seen, scale, buffers)
        acc, m, mass, w, shrink, done = _advance_all(
            acc, m, mass, w, shrink, done, (hidden, clear, total), fixed, MODE, D, STAGES, GROUPS
        )
        mbarrier.wait(v_full.index(done % STAGES), (done // STAGES) & 1)
        v = v_smem.index(done % STAGES)._reinterpret(dtype, [128, D], flat)
        if LATE:
            acc = shrunk(acc, shrink)
            w = rounded(w, dtype, o_layout, PAIRS)
        acc = warpgroup_mma(operand(w, dtype, o_layout, PAIRS), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(done % STAGES))
        done += 1
        if SPREAD:
            mass = gl.sum(mass, 1)
        q_rows.store((acc / gl.convert_layout(mass, gl.SliceLayout(1, o_layout))[:, None]).to(dtype))
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
