"""FlashAttention for Hopper, in Gluon: the algorithm of `attention/flash.py` with warp specialisation.

*Roles.* One producer warp copies by TMA (`load_items`). Consumer warpgroups of four warps compute 64 rows
each (`_compute`) and do not wait for one another. A program takes *items* (`items.py`), one tile of rows
each, and visits the key tiles of each item.

*One tile* (`_advance`). A warpgroup issues the GEMM q · k of the next tile together with p · v of the last
one (FlashAttention-3, section 3.2). While it computes exponentials, the tensor cores work for other
warpgroups.

*The grid* is persistent: programs take items from a common counter, in one of the orders of `hopper_plan.py`.
Query heads of one key head follow one another, so that they share keys in L2.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltafront.kernels.attention.hopper.buffers import new_buffers
from deltafront.kernels.attention.hopper.items import (
    Lists,
    Sources,
    Work,
    extent_of,
    item_of,
    load_items,
    next_entry,
)
from deltafront.kernels.attention.hopper.softmax import (
    NEGATIVE,
    Running,
    Seen,
    acc_layout,
    mask_exact,
    mask_packed,
    online_softmax,
    operand,
    rescaled,
    rounded,
    seen_by,
    tile_columns,
    zero_l_i,
)
from deltafront.kernels.hopper.layouts import GROUP_ROWS, TILE, scores_layout

NEVER, ALWAYS, IF_MASKED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""`_advance` masks no tile, every tile, or the first `Extent.masked` tiles of an item."""


class OwnRows(NamedTuple):
    """A warpgroup's 64 query rows of one item, in shared memory or registers, and the keys that they may
    attend to (`seen`)."""

    q: gl.tensor
    seen: Seen
    scale: gl.tensor


class Results(NamedTuple):
    """TMA descriptors of the output: one for an item's rows, one for tail rows. lse_ptr: (SPLIT) each row's
    base-2 log-sum-exp, float32."""

    out: tma.tensor_descriptor
    out_tail: tma.tensor_descriptor
    lse_ptr: gl.tensor


@gluon.jit
def _matrix(buffer, ROWS: gl.constexpr, PLAN: gl.constexpr):
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, PLAN.dim], buffer.dtype)
    return buffer._reinterpret(buffer.dtype, [ROWS, PLAN.dim], flat)


@gluon.jit
def _begin_scores(q, buffer, PLAN: gl.constexpr):
    k = _matrix(buffer, TILE, PLAN)
    blank = gl.zeros([GROUP_ROWS, TILE], gl.float32, layout=scores_layout())
    return warpgroup_mma(q, k.permute([1, 0]), blank, use_acc=False, is_async=True)


@gluon.jit
def _begin_sum(running, buffer, PLAN: gl.constexpr):
    v = _matrix(buffer, TILE, PLAN)
    acc = running.acc
    p = running.p
    if PLAN.late_rescale:
        acc = rescaled(acc, running.alpha)
        p = rounded(p, buffer.dtype, PLAN)
    return warpgroup_mma(operand(p, buffer.dtype, PLAN), v, acc, is_async=True)


@gluon.jit
def _advance(
    running, done, i, rows, buffers, WEIGHTED: gl.constexpr, MASK: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Compute the scores and p (softmax weights) of key tile i while adding p · v of tile i - 1 to acc. done:
    tiles added so far."""
    seen = rows.seen
    keys = buffers.k
    values = buffers.v
    dtype: gl.constexpr = values.buffers.dtype
    column = tile_columns()
    keys.wait_full(done + 1)
    s = _begin_scores(rows.q, keys.buffer(done + 1), PLAN)
    values.wait_full(done)
    acc = _begin_sum(running, values.buffer(done), PLAN)
    s = warpgroup_mma_wait(1, deps=[s])
    if not WEIGHTED:
        keys.release(done + 1)
    if not PLAN.late_rescale:
        acc = warpgroup_mma_wait(0, deps=[acc])
        values.release(done)
    if MASK == ALWAYS:
        s = mask_packed(s, column, i, seen) if WEIGHTED else mask_exact(s, column, i, seen, PLAN)
    if MASK == IF_MASKED:  # noqa: SIM102 (MASK is known when compiling, i is not)
        if i < seen.extent.masked:
            s = mask_exact(s, column, i, seen, PLAN)
    lengths = rows.scale
    if WEIGHTED:
        line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        buffer = buffers.lengths.index((done + 1) % PLAN.stages)._reinterpret(gl.float32, [TILE], line)
        lengths = buffer.load(gl.SliceLayout(0, scores_layout()))
    p, m_i, l_i, alpha = online_softmax(s, running.m_i, running.l_i, rows.scale, lengths, WEIGHTED, PLAN)
    if WEIGHTED:
        keys.release_loaded(done + 1)  # also releases the run lengths
    if PLAN.late_rescale:
        acc = warpgroup_mma_wait(0, deps=[acc])
        values.release(done)
    else:
        p = rounded(p, dtype, PLAN)
        acc = rescaled(acc, alpha)
    return Running(acc, m_i, l_i, p, alpha), done + 1


@gluon.jit
def _advance_all(running, done, ends, rows, buffers, PLAN: gl.constexpr):
    """Run `_advance` for every tile but the first. Where it is faster, each kind of tile has its own loop."""
    if PLAN.packed:
        if PLAN.warpgroups == 3:  # else an item's rows lie in one block, and only the first tile is masked
            for i in range(1, ends.masked_end):
                running, done = _advance(
                    running, done, i, rows, buffers, WEIGHTED=False, MASK=ALWAYS, PLAN=PLAN
                )
        for i in range(ends.masked_end if PLAN.warpgroups == 3 else 1, ends.unmasked_end):
            running, done = _advance(running, done, i, rows, buffers, WEIGHTED=True, MASK=NEVER, PLAN=PLAN)
        for i in range(ends.unmasked_end, ends.tiles):
            running, done = _advance(running, done, i, rows, buffers, WEIGHTED=True, MASK=ALWAYS, PLAN=PLAN)
    elif PLAN.in_pairs:
        for i in range(ends.begin + 1, ends.masked_end):
            running, done = _advance(running, done, i, rows, buffers, WEIGHTED=False, MASK=ALWAYS, PLAN=PLAN)
        for i in range(ends.masked_end, ends.tiles):
            running, done = _advance(running, done, i, rows, buffers, WEIGHTED=False, MASK=NEVER, PLAN=PLAN)
    else:
        MASK: gl.constexpr = NEVER if PLAN.listed else IF_MASKED
        for i in range(ends.begin + 1, ends.tiles):
            running, done = _advance(running, done, i, rows, buffers, WEIGHTED=False, MASK=MASK, PLAN=PLAN)
    return running, done


@gluon.jit
def _store_lse(lse_ptr, m_i, l_i, item, row0, work):
    """Store the log-sum-exps of a warpgroup's rows, from row0 on. A row without keys in this split gets
    NEGATIVE."""
    row = row0 + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, scores_layout()))
    head = ((item.b * work.splits + item.split) * work.heads + item.h).to(gl.int64)
    lse = gl.where(l_i > 0, m_i + gl.log2(l_i), NEGATIVE)
    gl.store(lse_ptr + head * work.rows + row, lse, mask=row < work.rows)


@gluon.jit
def _compute(  # noqa: PLR0915 (jitted: a helper for each step would only hide their order)
    WARPGROUP: gl.constexpr, results, buffers, work, scale, PLAN: gl.constexpr
):  # fmt: skip
    """Run a consumer warpgroup. done: tiles processed so far; taken: items processed so far.

    The output is copied from the queries' buffer. With two query buffers, the copy ends during the next item.
    """
    queries = buffers.q.part(WARPGROUP)
    keys = buffers.k
    values = buffers.v
    dtype: gl.constexpr = values.buffers.dtype
    D: gl.constexpr = PLAN.dim
    column = tile_columns()
    done = 0
    taken = 0
    entry = next_entry(taken, buffers.entries)
    while entry >= 0:
        item = item_of(entry, work, PLAN)
        extent = extent_of(item, work, PLAN)
        seen, ends = seen_by(item, extent, work, WARPGROUP, PLAN)
        m_i = gl.full([GROUP_ROWS], NEGATIVE, gl.float32, layout=gl.SliceLayout(1, scores_layout()))
        l_i = zero_l_i(PLAN)
        acc = gl.zeros([GROUP_ROWS, D], gl.float32, layout=acc_layout(PLAN.dim))
        queries.wait_full(taken)
        q_buffer = queries.buffer(taken)
        q_rows = _matrix(q_buffer, GROUP_ROWS, PLAN)
        # Keep queries in registers where enough are free.
        q = q_rows.load(gl.DotOperandLayout(0, scores_layout(), 2)) if PLAN.listed else q_rows
        keys.wait_full(done)
        s = _begin_scores(q, keys.buffer(done), PLAN)
        if PLAN.query_buffers == 2:
            tma.store_wait(0)
            queries.release(taken + 1, pred=taken > 0)
        taken += 1
        s = warpgroup_mma_wait(0, deps=[s])
        keys.release(done)
        if PLAN.split:
            if ends.begin < extent.masked:
                s = mask_exact(s, column, ends.begin, seen, PLAN)
        else:
            s = mask_exact(s, column, 0, seen, PLAN)
        p, m_i, l_i, alpha = online_softmax(s, m_i, l_i, scale, scale, WEIGHTED=False, PLAN=PLAN)
        if not PLAN.late_rescale:
            p = rounded(p, dtype, PLAN)
        rows = OwnRows(q, seen, scale)
        running, done = _advance_all(Running(acc, m_i, l_i, p, alpha), done, ends, rows, buffers, PLAN)
        values.wait_full(done)
        acc = _begin_sum(running, values.buffer(done), PLAN)
        acc = warpgroup_mma_wait(0, deps=[acc])
        values.release(done)
        done += 1
        l_i = gl.sum(running.l_i, 1) if PLAN.l_i_in_threads else running.l_i
        row0 = (item.tile * PLAN.warpgroups + WARPGROUP) * GROUP_ROWS
        b = item.b
        if PLAN.split:
            _store_lse(results.lse_ptr, running.m_i, l_i, item, row0, work)
            l_i = gl.where(l_i > 0, l_i, 1.0)
            b = item.b * work.splits + item.split
        q_rows.store((acc / gl.convert_layout(l_i, gl.SliceLayout(1, acc.type.layout))[:, None]).to(dtype))
        fence_async_shared()
        place = [b, item.h, row0, 0]
        if item.tail:
            tma.async_copy_shared_to_global(results.out_tail, place, q_buffer)
        else:
            tma.async_copy_shared_to_global(results.out, place, q_buffer)
        if PLAN.query_buffers == 1:
            tma.store_wait(0)
            queries.release(0)
        entry = next_entry(taken, buffers.entries)
    tma.store_wait(0)


_VARYING = (
    "stride_ib stride_ih stride_in items tiles tail_tiles keys row0 tail_row0 critical chunk_slots splits"
    " rows"
).split()


@gluon.jit(do_not_specialize=_VARYING)
def hopper_kernel(
    q, k, v, out, q_tail, out_tail, packed_k, packed_v, weight, packed_ptr, index_ptr, order_ptr, counter_ptr,
    lse_ptr, stride_ib, stride_ih, stride_in, items, batch, heads, group, tiles, tail_tiles,
    keys, row0, step, tail_row0, critical, chunk, chunk_slots, splits, rows, scale,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Run one program: allocate buffers and barriers, then start the producer and consumer warps. `Sources`,
    `Results`, `Lists` and `Work` explain the arguments."""
    buffers = new_buffers(q, k, v, weight, PLAN)
    work = Work(
        items, batch, heads, group, tiles, tail_tiles, keys, row0, step, tail_row0, critical, chunk,
        packed_ptr, chunk_slots, splits, rows,
    )  # fmt: skip
    sources = Sources(q, k, v, q_tail, packed_k, packed_v, weight)
    lists = Lists(order_ptr, counter_ptr, index_ptr, stride_ib, stride_ih, stride_in)
    results = Results(out, out_tail, lse_ptr)
    # fmt: off
    if PLAN.warpgroups == 2:
        gl.warp_specialize(
            [
                (_compute, (0, results, buffers, work, scale, PLAN)),
                (_compute, (1, results, buffers, work, scale, PLAN)),
                (load_items, (sources, lists, buffers, work, PLAN)),
            ],
            [4, 1],
            [PLAN.registers, PLAN.copying_registers],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (0, results, buffers, work, scale, PLAN)),
                (_compute, (1, results, buffers, work, scale, PLAN)),
                (_compute, (2, results, buffers, work, scale, PLAN)),
                (load_items, (sources, lists, buffers, work, PLAN)),
            ],
            [4, 4, 1],
            [PLAN.registers, PLAN.registers, PLAN.copying_registers],
        )
    # fmt: on
