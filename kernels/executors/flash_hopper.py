"""Online-softmax attention for Hopper, in Gluon: the algorithm of `flash.py` with the roles split by warps.

One warp copies (TMA), two warpgroups compute 64 rows each. A warpgroup issues the scores of the next tile and
the weighted sum of the last one together and takes the exponentials of one while the matrix unit works on the
other (FlashAttention-3, section 3.2). The grid is persistent: 132 programs walk over all row tiles, the tiles
of a key head's query heads side by side so that they share keys in L2, longest rows first, every second round
in reverse so that the programs' shares even out.

RANGE, LIST and PACKED as in `flash.py`; masked tiles come first in a row's list.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..interface import BLOCK, AttentionInput, TileMask
from .flash import LIST, PACKED, RANGE
from .launch import LOG2E, Packed, Rows

NEGATIVE = gl.constexpr(-1.0e30)
"""Score of an unseen key; finite for the reason given in `flash.py`."""


@gluon.jit
def _item(turn, items):
    """The item that this program takes in its turn; at least `items` when there is none."""
    programs = gl.num_programs(0)
    lane = gl.program_id(0)
    lane = gl.where(turn % 2 == 1, programs - 1 - lane, lane)
    return turn * programs + lane


@gluon.jit
def _place(item, shape, ORDER: gl.constexpr):
    """Batch, query head, key head, row tile of an item, and whether it is one of the leading rows."""
    batch, heads, group, tiles, lead_tiles = shape
    key_heads = heads // group
    lead_items = batch * heads * lead_tiles
    lead = item < lead_items
    if not lead:
        item -= lead_items
    count = gl.where(lead, lead_tiles, tiles)
    if ORDER == 0:
        pair = item // (count * group)
        tile = count - 1 - item % (count * group) // group
    else:
        tile = count - 1 - item // (batch * heads)
        pair = item % (batch * heads) // group
    g = pair % key_heads
    return pair // key_heads, g * group + item % group, g, tile, lead


@gluon.jit
def _extent(b, h, g, tile, lead, shape, spans, tables, MODE: gl.constexpr):
    """The rows' first position and step; key tiles in all, exact, masked; first exact and masked one; packed."""
    batch, heads, group, tiles, lead_tiles = shape
    keys, row0, step, lead_row0, critical, chunk = spans
    count_ptr, packed_ptr, chunk_slots = tables
    step = gl.where(lead, 1, step)
    first = gl.where(lead, lead_row0, row0) + step * tile * 128
    end = gl.minimum(first + step * 127, keys - 1) // 128 + 1
    whole = gl.minimum((first + 1) // 128, end - 1)
    total = end
    exact = end
    begin = 0
    packed = 0
    if MODE == 1:
        total = gl.load(count_ptr + (b * heads + h) * tiles + tile)
        exact = total
    if MODE == 2:
        begin = gl.maximum(first - critical, 0) // chunk
        packed = gl.load(packed_ptr + (b * (heads // group) + g) * chunk_slots + begin)
        begin = begin * (chunk // 128)
        whole = gl.maximum(whole, begin)
        exact = end - begin
        total = exact + (packed + 127) // 128
    return first, step, total, exact, end - whole, begin, whole, packed


@gluon.jit
def _copy(near, far, place, far_row, is_near, full, smem, MODE: gl.constexpr, MORE: gl.constexpr = 0):
    """Start copying one tile of keys or values: from the sequence, or (PACKED) from the packed rows."""
    b, g, row = place
    mbarrier.expect(full, near.block_type.nbytes + MORE)
    if MODE == 2:
        tma.async_copy_global_to_shared(near, [b, g, row, 0], full, smem, pred=is_near)
        tma.async_copy_global_to_shared(far, [b, g, far_row, 0], full, smem, pred=is_near == 0)
    else:
        tma.async_copy_global_to_shared(near, [b, g, row, 0], full, smem)


@gluon.jit
def _load(
    sources, index, buffers, items, shape, spans, tables,
    MODE: gl.constexpr, ORDER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: for each item its queries, then keys and values tile by tile."""
    q, k, v, q_lead, packed_k, packed_v, weight = sources
    index_ptr, index_batch, index_head, index_row = index
    q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = buffers
    done = 0
    taken = 0
    for turn in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = _item(turn, items)
        if item < items:
            b, h, g, tile, lead = _place(item, shape, ORDER)
            _, _, total, exact, masked, begin, whole, _ = _extent(
                b, h, g, tile, lead, shape, spans, tables, MODE
            )
            for half in gl.static_range(2):
                row = tile * 128 + half * 64
                full, smem = q_full.index(half), q_smem.index(half)
                mbarrier.wait(q_empty.index(half), (taken & 1) ^ 1)
                mbarrier.expect(full, q.block_type.nbytes)
                tma.async_copy_global_to_shared(q, [b, h, row, 0], full, smem, pred=lead == 0)
                tma.async_copy_global_to_shared(q_lead, [b, h, row, 0], full, smem, pred=lead)
            taken += 1
            entry_ptr = (
                index_ptr + b.to(gl.int64) * index_batch + h.to(gl.int64) * index_head + tile * index_row
            )
            for i in range(total):
                stage = done % STAGES
                phase = ((done // STAGES) & 1) ^ 1
                if MODE == 1:
                    row = gl.load(entry_ptr + gl.where(i == 0, total - 1, i - 1)).to(gl.int32) * 128
                else:
                    row = gl.where(i < masked, whole + i, begin + i - masked) * 128
                place = (b, g, row)
                far_row = (i - exact) * 128
                mbarrier.wait(k_empty.index(stage), phase)
                full = k_full.index(stage)
                if MODE == 2:
                    _copy(k, packed_k, place, far_row, i < exact, full, k_smem.index(stage), MODE, 512)
                    at = [b, g, gl.maximum(far_row, 0)]
                    tma.async_copy_global_to_shared(weight, at, full, w_smem.index(stage))
                else:
                    _copy(k, packed_k, place, far_row, i < exact, full, k_smem.index(stage), MODE)
                mbarrier.wait(v_empty.index(stage), phase)
                _copy(v, packed_v, place, far_row, i < exact, v_full.index(stage), v_smem.index(stage), MODE)
                done += 1


@gluon.jit
def _weigh(s, m, l, scale, weight, WEIGHTED: gl.constexpr):
    """Exponentials of one tile's products s: the weights p, the new m and l, and what shrinks the sums so far."""
    top = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - top[:, None])
    shrink = gl.exp2(m - top)
    if WEIGHTED:
        l = l * shrink + gl.sum(p * weight[None, :], 1)
    else:
        l = l * shrink + gl.sum(p, 1)
    return p, top, l, shrink


@gluon.jit
def _advance(
    acc, m, l, p, shrink, done, taken, q, i, position, limits, scale, buffers,
    half: gl.constexpr, EARLY: gl.constexpr, PINGPONG: gl.constexpr,
    KIND: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of tile i while tile i - 1, whose exponentials are p, is summed.

    KIND 0: all keys are seen, 1: causal, 2: packed, 3: packed and the last. What waits for the scores' issue
    (rounding p, shrinking acc) overlaps with the matrix unit's work on them.
    """
    q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = buffers
    whole, exact, total, packed = limits
    dtype: gl.constexpr = q_smem.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, D], dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, s_layout))
    blank = gl.zeros([64, 128], gl.float32, layout=s_layout)
    next_stage = (done + 1) % STAGES
    mbarrier.wait(k_full.index(next_stage), ((done + 1) // STAGES) & 1)
    k = k_smem.index(next_stage)._reinterpret(dtype, [128, D], flat)
    if PINGPONG:
        mbarrier.wait(turns.index(half), ((done - taken) & 1) ^ half)
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
    if PINGPONG:
        mbarrier.arrive(turns.index(1 - half))
    s = warpgroup_mma_wait(1, deps=[s])
    weight = scale
    if KIND >= 2:
        line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        weight = w_smem.index(next_stage)._reinterpret(gl.float32, [128], line).load(column.type.layout)
    else:
        mbarrier.arrive(k_empty.index(next_stage))
    if KIND == 1:
        s = gl.where((whole + i) * 128 + column[None, :] <= position[:, None], s, NEGATIVE)
    if KIND == 3:
        s = gl.where(((i - exact) * 128 + column < packed)[None, :], s, NEGATIVE)
    p, m, l, shrink = _weigh(s, m, l, scale, weight, KIND >= 2)
    if KIND >= 2:
        mbarrier.arrive(k_empty.index(next_stage))  # its stage holds the tile's run lengths too
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage))
    if not EARLY:
        p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, m, l, p, shrink, done + 1


@gluon.jit
def _compute(
    half: gl.constexpr, results, buffers, items, shape, spans, tables,
    MODE: gl.constexpr, ORDER: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each item."""
    out, out_lead, scale = results
    q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = buffers
    batch, heads, group, tiles, lead_tiles = shape
    dtype: gl.constexpr = q_smem.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, D], dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, s_layout))
    done = 0
    taken = 0
    for turn in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = _item(turn, items)
        if item < items:
            b, h, g, tile, lead = _place(item, shape, ORDER)
            first, step, total, exact, masked, _, whole, packed = _extent(
                b, h, g, tile, lead, shape, spans, tables, MODE
            )
            limits = (whole, exact, total, packed)
            position = first + step * (half * 64 + gl.arange(0, 64, layout=row_layout))
            m = gl.full([64], NEGATIVE, gl.float32, layout=row_layout)
            l = gl.zeros([64], gl.float32, layout=row_layout)
            acc = gl.zeros([64, D], gl.float32, layout=o_layout)
            mbarrier.wait(q_full.index(half), taken & 1)
            taken += 1
            q = q_smem.index(half)._reinterpret(dtype, [64, D], flat)
            mbarrier.wait(k_full.index(done % STAGES), (done // STAGES) & 1)
            k = k_smem.index(done % STAGES)._reinterpret(dtype, [128, D], flat)
            blank = gl.zeros([64, 128], gl.float32, layout=s_layout)
            s = warpgroup_mma(q, k.permute([1, 0]), blank, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(done % STAGES))
            s = gl.where(whole * 128 + column[None, :] <= position[:, None], s, NEGATIVE)
            p, m, l, shrink = _weigh(s, m, l, scale, scale, False)
            if not EARLY:
                p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
            if MODE != 1:
                for i in range(1, masked):
                    acc, m, l, p, shrink, done = _advance(
                        acc, m, l, p, shrink, done, taken, q, i, position, limits, scale, buffers,
                            half, EARLY, PINGPONG, 1, D, STAGES
                    )  # fmt: skip
            for i in range(masked, exact):
                acc, m, l, p, shrink, done = _advance(
                    acc, m, l, p, shrink, done, taken, q, i, position, limits, scale, buffers,
                        half, EARLY, PINGPONG, 0, D, STAGES
                )  # fmt: skip
            if MODE == 2:
                for i in range(exact, total - 1):
                    acc, m, l, p, shrink, done = _advance(
                        acc, m, l, p, shrink, done, taken, q, i, position, limits, scale, buffers,
                        half, EARLY, PINGPONG, 2, D, STAGES
                    )  # fmt: skip
                for i in range(gl.maximum(exact, total - 1), total):
                    acc, m, l, p, shrink, done = _advance(
                        acc, m, l, p, shrink, done, taken, q, i, position, limits, scale, buffers,
                        half, EARLY, PINGPONG, 3, D, STAGES
                    )  # fmt: skip
            mbarrier.wait(v_full.index(done % STAGES), (done // STAGES) & 1)
            v = v_smem.index(done % STAGES)._reinterpret(dtype, [128, D], flat)
            if EARLY:
                p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
            acc = warpgroup_mma(p, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(done % STAGES))
            done += 1
            q.store((acc / gl.convert_layout(l, gl.SliceLayout(1, o_layout))[:, None]).to(dtype))
            fence_async_shared()
            place = [b, h, tile * 128 + half * 64, 0]
            if lead:
                tma.async_copy_shared_to_global(out_lead, place, q_smem.index(half))
            else:
                tma.async_copy_shared_to_global(out, place, q_smem.index(half))
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(half))


@gluon.jit
def hopper_kernel(
    q, k, v, out, q_lead, out_lead, packed_k, packed_v, weight, packed_ptr, index_ptr, count_ptr,
    index_batch, index_head, index_row, items, batch, heads, group, tiles, lead_tiles,
    keys, row0, step, lead_row0, critical, chunk, chunk_slots, scale,
    MODE: gl.constexpr, ORDER: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    EARLY: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the three roles. Shapes and orders: `launch`."""
    q_smem = gl.allocate_shared_memory(q.dtype, [2, 1, 1, 64, D], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, 128, D], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, 128, D], v.layout)
    w_smem = v_smem
    if MODE == 2:
        w_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, 128], weight.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(turns.index(half), count=1)
        mbarrier.init(q_full.index(half), count=1)
        mbarrier.init(q_empty.index(half), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    buffers = (q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns)
    shape = (batch, heads, group, tiles, lead_tiles)
    spans = (keys, row0, step, lead_row0, critical, chunk)
    tables = (count_ptr, packed_ptr, chunk_slots)
    index = (index_ptr, index_batch, index_head, index_row)
    results = (out, out_lead, scale)
    sources = (q, k, v, q_lead, packed_k, packed_v, weight)
    gl.warp_specialize(
        [
            (_compute, (0, results, buffers, items, shape, spans, tables, MODE, ORDER, D, STAGES, EARLY, PINGPONG)),
            (_compute, (1, results, buffers, items, shape, spans, tables, MODE, ORDER, D, STAGES, EARLY, PINGPONG)),
            (_load, (sources, index, buffers, items, shape, spans, tables, MODE, ORDER, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def launch(
    x: AttentionInput, rows: Rows, lead: Rows | None, *, mask: TileMask | None, packed: Packed | None,
    order: int | None = None, stages: int = 2, early: bool = True, pingpong: bool = False,
) -> None:  # fmt: skip
    """See `launch.launch`; x, rows and lead satisfy `launch.takes_hopper`."""
    batch, heads, count, dim = rows.q_BHRD.shape
    tiles = triton.cdiv(count, BLOCK)
    lead_tiles = 0 if lead is None else triton.cdiv(lead.q_BHRD.shape[2], BLOCK)
    items = batch * heads * (tiles + lead_tiles)
    q, out = _descriptor(rows.q_BHRD, 64), _descriptor(rows.out_BHRD, 64)
    k, v = _descriptor(x.k_BGSD, BLOCK), _descriptor(x.v_BGSD, BLOCK)
    none = x.k_BGSD.new_empty(1, dtype=torch.int32) if mask is None or packed is None else None
    programs = torch.cuda.get_device_properties(x.q_BHTD.device).multi_processor_count
    hopper_kernel[(min(items, programs),)](
        q,
        k,
        v,
        out,
        q if lead is None else _descriptor(lead.q_BHRD, 64),
        out if lead is None else _descriptor(lead.out_BHRD, 64),
        k if packed is None else _descriptor(packed.k_BGPD, BLOCK),
        v if packed is None else _descriptor(packed.v_BGPD, BLOCK),
        k if packed is None else _descriptor(packed.weight_BGP, BLOCK),
        none if packed is None else packed.offset_BGC,
        none if mask is None else mask.index_BHNM,
        none if mask is None else mask.count_BHN.contiguous(),
        *((0, 0, 0) if mask is None else mask.index_BHNM.stride()[:3]),
        items,
        batch,
        heads,
        x.group,
        tiles,
        lead_tiles,
        x.k_BGSD.shape[2],
        rows.row0,
        rows.step,
        0 if lead is None else lead.row0,
        0 if packed is None else packed.critical,
        BLOCK if packed is None else packed.chunk,
        0 if packed is None else packed.offset_BGC.shape[2],
        x.scale * LOG2E,
        MODE=RANGE if mask is None and packed is None else LIST if packed is None else PACKED,
        ORDER=1 if order is None else order,
        D=dim,
        STAGES=stages if dim == 128 else 4,
        EARLY=early,
        PINGPONG=pingpong,
        REGISTERS=240,
        num_warps=4,
    )


def _descriptor(t: torch.Tensor, block: int) -> TensorDescriptor:
    """How the copy engine sees t: tiles of `block` rows of one head (or so many numbers, if t has no D).

    Strides of dimensions of size 1 do not matter and may be anything.
    """
    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[t.dtype]
    strides = [s if n > 1 else 128 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True)]
    if t.dim() == 4:
        shape = [1, 1, block, t.shape[3]]
        layout = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    else:
        shape = [1, 1, block]
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return TensorDescriptor(t, list(t.shape), [*strides, 1], shape, layout)
