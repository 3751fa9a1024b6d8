"""The computing warps of the Hopper kernel at head dimension 64: scores are one tile ahead.

At D 64 the exponentials take as long as both products. So the scores of the next tile are issued before this
tile's exponentials are taken, and its weighted sum is left running while the next ones are: the matrix unit
always has two products queued behind one warpgroup's exponentials (FlashAttention-3, section 3.2, with one
stage more). Two tiles of scores and the sums fit the registers at D 64 only.
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

from .hopper_tiles import extent_of, item_of, place_of

NEGATIVE = gl.constexpr(-1.0e30)
"""Score of an unseen key; finite for the reason given in `flash.py`."""


@gluon.jit
def _scores(q, k_smem, k_full, at, D: gl.constexpr, STAGES: gl.constexpr):
    """Issue the products of q with the keys of the at-th tile."""
    dtype: gl.constexpr = k_smem.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, D], dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    mbarrier.wait(k_full.index(at % STAGES), (at // STAGES) & 1)
    k = k_smem.index(at % STAGES)._reinterpret(dtype, [128, D], flat)
    blank = gl.zeros([64, 128], gl.float32, layout=s_layout)
    return warpgroup_mma(q, k.permute([1, 0]), blank, use_acc=False, is_async=True)


@gluon.jit
def _weigh(s, m, mass, scale, i, at, limits, w_smem, MODE: gl.constexpr, STAGES: gl.constexpr):
    """Exponentials of tile i's products s, the new m and mass, and what shrinks the sums so far."""
    position, whole, exact, masked = limits
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, s.type.layout))
    if MODE != 1:  # noqa: SIM102 (MODE is known when compiling, i is not)
        if i < masked:
            s = gl.where((whole + i) * 128 + column[None, :] <= position[:, None], s, NEGATIVE)
    top = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - top[:, None])
    shrink = gl.exp2(m - top)
    if MODE == 2:
        if i >= exact:
            line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
            lengths = w_smem.index(at % STAGES)._reinterpret(gl.float32, [128], line)
            added = gl.sum(p * lengths.load(column.type.layout)[None, :], 1)
        else:
            added = gl.sum(p, 1)
    else:
        added = gl.sum(p, 1)
    return p, top, mass * shrink + added, shrink


@gluon.jit
def _add(acc, p, v_smem, v_full, at, D: gl.constexpr, STAGES: gl.constexpr):
    """Issue the sum of the at-th tile's values, weighted with p."""
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, D], v_smem.dtype)
    mbarrier.wait(v_full.index(at % STAGES), (at // STAGES) & 1)
    return warpgroup_mma(
        p, v_smem.index(at % STAGES)._reinterpret(v_smem.dtype, [128, D], flat), acc, is_async=True
    )


@gluon.jit
def _shrunk(acc, shrink):
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def compute_ahead(  # noqa: PLR0915 (jitted)
    half: gl.constexpr, results, buffers, work,
    MODE: gl.constexpr, ORDER: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each item. Arguments as for `flash_hopper._compute`."""
    out, out_lead, scale = results
    items, shape, spans, tables = work
    q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    dtype: gl.constexpr = q_smem.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    w_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    done = 0
    taken = 0
    for turn in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = item_of(turn, items)
        if item < items:
            b, h, g, tile, lead = place_of(item, shape, ORDER)
            first, step, total, exact, masked, _, whole, packed = extent_of(
                b, h, g, tile, lead, shape, spans, tables, MODE, 64 * GROUPS
            )
            position = first + step * (half * 64 + gl.arange(0, 64, layout=row_layout))
            limits = (position, whole, exact, masked)
            m = gl.full([64], NEGATIVE, gl.float32, layout=row_layout)
            mass = gl.zeros([64], gl.float32, layout=row_layout)
            acc = gl.zeros([64, D], gl.float32, layout=o_layout)
            p = gl.zeros([64, 128], dtype, layout=w_layout)  # before the first tile: adds nothing
            mine = half * AHEAD + taken % AHEAD
            mbarrier.wait(q_full.index(mine), (taken // AHEAD) & 1)
            q = q_smem.index(mine)._reinterpret(dtype, [64, D], flat)
            s = _scores(q, k_smem, k_full, done, D, STAGES)
            if AHEAD == 2:
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(half * 2 + (taken + 1) % 2), pred=taken > 0)
            taken += 1
            s = warpgroup_mma_wait(0, deps=[s])
            if MODE == 1:  # a list's only masked tile comes first
                column = gl.arange(0, 128, layout=gl.SliceLayout(0, s_layout))
                s = gl.where(whole * 128 + column[None, :] <= position[:, None], s, NEGATIVE)
            for i in range(total - 1):
                before = gl.maximum(i - 1, 0) - i + done
                acc = _add(acc, p, v_smem, v_full, before, D, STAGES)
                following = _scores(q, k_smem, k_full, done + 1, D, STAGES)
                e, m, mass, shrink = _weigh(s, m, mass, scale, i, done, limits, w_smem, MODE, STAGES)
                mbarrier.arrive(k_empty.index(done % STAGES))
                acc, s = warpgroup_mma_wait(0, deps=[acc, following])
                mbarrier.arrive(v_empty.index(before % STAGES), pred=i > 0)
                acc = _shrunk(acc, shrink)
                p = gl.convert_layout(e.to(dtype), w_layout)
                done += 1
            i = total - 1
            before = gl.maximum(i - 1, 0) - i + done
            acc = _add(acc, p, v_smem, v_full, before, D, STAGES)
            if MODE == 2:  # noqa: SIM102 (MODE is known when compiling, i is not)
                if i >= exact:
                    column = gl.arange(0, 128, layout=gl.SliceLayout(0, s_layout))
                    s = gl.where(((i - exact) * 128 + column < packed)[None, :], s, NEGATIVE)
            e, m, mass, shrink = _weigh(s, m, mass, scale, i, done, limits, w_smem, MODE, STAGES)
            mbarrier.arrive(k_empty.index(done % STAGES))
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(before % STAGES), pred=i > 0)
            acc = _add(
                _shrunk(acc, shrink),
                gl.convert_layout(e.to(dtype), w_layout),
                v_smem,
                v_full,
                done,
                D,
                STAGES,
            )
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
    tma.store_wait(0)
