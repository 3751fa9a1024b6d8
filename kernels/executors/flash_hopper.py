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
    """The row tile that this program takes in its turn; at least `items` when there is none."""
    programs = gl.num_programs(0)
    lane = gl.program_id(0)
    lane = gl.where(turn % 2 == 1, programs - 1 - lane, lane)
    return turn * programs + lane


@gluon.jit
def _place(item, heads, group, tiles):
    """Batch, query head, key head and row tile of an item."""
    per_key_head = tiles * group
    pair = item // per_key_head
    rest = item % per_key_head
    key_heads = heads // group
    g = pair % key_heads
    return pair // key_heads, g * group + rest % group, g, tiles - 1 - rest // group


@gluon.jit
def _extent(b, h, g, tile, p, MODE: gl.constexpr):
    """Key tiles of a row tile: in all, masked, exact; the first exact one, the first masked one, packed rows."""
    count_ptr, packed_ptr, heads, group, tiles, keys, row0, step, critical, chunk, chunk_slots = p
    first = row0 + step * tile * 128
    if MODE == 1:
        kept = gl.load(count_ptr + (b * heads + h) * tiles + tile)
        return kept, 1, kept, 0, first // 128, 0
    end = gl.minimum(first + step * 127, keys - 1) // 128 + 1
    whole = (first + 1) // 128
    if MODE == 0:
        return end, end - whole, end, 0, whole, 0
    begin = gl.maximum(first - critical, 0) // chunk
    packed = gl.load(packed_ptr + (b * (heads // group) + g) * chunk_slots + begin)
    begin = begin * (chunk // 128)
    whole = gl.maximum(whole, begin)
    exact = end - begin
    return exact + (packed + 127) // 128, end - whole, exact, begin, whole, packed


@gluon.jit
def _load(q, k, v, packed_k, packed_v, index, buffers, items, p, MODE: gl.constexpr, STAGES: gl.constexpr):
    """The copying warp: for each item its queries, then keys and values tile by tile."""
    index_ptr, index_batch, index_head, index_row = index
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    count_ptr, packed_ptr, heads, group, tiles, keys, row0, step, critical, chunk, chunk_slots = p
    turns = (items + gl.num_programs(0) - 1) // gl.num_programs(0)
    done = 0
    taken = 0
    for turn in range(turns):
        item = _item(turn, items)
        if item < items:
            b, h, g, tile = _place(item, heads, group, tiles)
            total, masked, exact, begin, whole, packed = _extent(b, h, g, tile, p, MODE)
            for half in gl.static_range(2):
                mbarrier.wait(q_empty.index(half), (taken & 1) ^ 1)
                mbarrier.expect(q_full.index(half), q.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    q, [b, h, tile * 128 + half * 64, 0], q_full.index(half), q_smem.index(half)
                )
            taken += 1
            entry_ptr = (
                index_ptr + b.to(gl.int64) * index_batch + h.to(gl.int64) * index_head + tile * index_row
            )
            for i in range(total):
                stage = done % STAGES
                phase = ((done // STAGES) & 1) ^ 1
                if MODE == 1:
                    entry = gl.load(entry_ptr + gl.where(i == 0, total - 1, i - 1))
                    row = entry.to(gl.int32) * 128
                else:
                    row = gl.where(i < masked, whole + i, begin + i - masked) * 128
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
                if MODE == 2:
                    near = i < exact
                    far_row = (i - exact) * 128
                    tma.async_copy_global_to_shared(
                        k, [b, g, row, 0], k_full.index(stage), k_smem.index(stage), pred=near
                    )
                    tma.async_copy_global_to_shared(
                        packed_k,
                        [b, g, far_row, 0],
                        k_full.index(stage),
                        k_smem.index(stage),
                        pred=i >= exact,
                    )
                else:
                    tma.async_copy_global_to_shared(
                        k, [b, g, row, 0], k_full.index(stage), k_smem.index(stage)
                    )
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                if MODE == 2:
                    near = i < exact
                    far_row = (i - exact) * 128
                    tma.async_copy_global_to_shared(
                        v, [b, g, row, 0], v_full.index(stage), v_smem.index(stage), pred=near
                    )
                    tma.async_copy_global_to_shared(
                        packed_v,
                        [b, g, far_row, 0],
                        v_full.index(stage),
                        v_smem.index(stage),
                        pred=i >= exact,
                    )
                else:
                    tma.async_copy_global_to_shared(
                        v, [b, g, row, 0], v_full.index(stage), v_smem.index(stage)
                    )
                done += 1


@gluon.jit
def _weigh(s, m, l, i, position, geometry, weights, scale, MODE: gl.constexpr):
    """Mask one tile's products s where it must be, and take exponentials: weights p, new m and l, shrink."""
    masked, whole, exact, total, packed = geometry
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, s.type.layout))
    if i < masked:
        seen = (whole + i) * 128 + column[None, :] <= position[:, None]
        s = gl.where(seen, s, NEGATIVE)
    if MODE == 2:
        if (i >= exact) & (i == total - 1):
            s = gl.where(((i - exact) * 128 + column < packed)[None, :], s, NEGATIVE)
    top = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - top[:, None])
    shrink = gl.exp2(m - top)
    if MODE == 2:
        weight = gl.full([128], 1.0, gl.float32, layout=gl.SliceLayout(0, s.type.layout))
        if i >= exact:
            place = (i - exact) * 128 + column
            weight = gl.load(weights + place, mask=place < packed, other=0.0)
        l = l * shrink + gl.sum(p * weight[None, :], 1)
    else:
        l = l * shrink + gl.sum(p, 1)
    return p, top, l, shrink


@gluon.jit
def _compute(
    half: gl.constexpr, out, weight_ptr, packed_slots, scale, buffers, items, p,
    MODE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each item."""
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    count_ptr, packed_ptr, heads, group, tiles, keys, row0, step, critical, chunk, chunk_slots = p
    dtype: gl.constexpr = q_smem.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, D], dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    blank = gl.zeros([64, 128], gl.float32, layout=s_layout)
    turns = (items + gl.num_programs(0) - 1) // gl.num_programs(0)
    done = 0
    taken = 0
    for turn in range(turns):
        item = _item(turn, items)
        if item < items:
            b, h, g, tile = _place(item, heads, group, tiles)
            total, masked, exact, begin, whole, packed = _extent(b, h, g, tile, p, MODE)
            geometry = (masked, whole, exact, total, packed)
            weights = weight_ptr + (b * (heads // group) + g) * packed_slots
            position = row0 + step * (tile * 128 + half * 64 + gl.arange(0, 64, layout=row_layout))
            m = gl.full([64], NEGATIVE, gl.float32, layout=row_layout)
            l = gl.zeros([64], gl.float32, layout=row_layout)
            acc = gl.zeros([64, D], gl.float32, layout=o_layout)
            mbarrier.wait(q_full.index(half), taken & 1)
            taken += 1
            q = q_smem.index(half)._reinterpret(dtype, [64, D], flat)
            mbarrier.wait(k_full.index(done % STAGES), (done // STAGES) & 1)
            k = k_smem.index(done % STAGES)._reinterpret(dtype, [128, D], flat)
            s = warpgroup_mma(q, k.permute([1, 0]), blank, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(done % STAGES))
            w, m, l, shrink = _weigh(s, m, l, 0, position, geometry, weights, scale, MODE)
            w = gl.convert_layout(w.to(dtype), p_layout)
            for i in range(1, total):
                stage = (done + 1) % STAGES
                mbarrier.wait(k_full.index(stage), ((done + 1) // STAGES) & 1)
                k = k_smem.index(stage)._reinterpret(dtype, [128, D], flat)
                s = warpgroup_mma(q, k.permute([1, 0]), blank, use_acc=False, is_async=True)
                before = done % STAGES
                mbarrier.wait(v_full.index(before), (done // STAGES) & 1)
                v = v_smem.index(before)._reinterpret(dtype, [128, D], flat)
                acc = warpgroup_mma(w, v, acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(k_empty.index(stage))
                fresh, m, l, shrink = _weigh(s, m, l, i, position, geometry, weights, scale, MODE)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_empty.index(before))
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
                w = gl.convert_layout(fresh.to(dtype), p_layout)
                done += 1
            mbarrier.wait(v_full.index(done % STAGES), (done // STAGES) & 1)
            v = v_smem.index(done % STAGES)._reinterpret(dtype, [128, D], flat)
            acc = warpgroup_mma(w, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(done % STAGES))
            done += 1
            q.store((acc / gl.convert_layout(l, gl.SliceLayout(1, o_layout))[:, None]).to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [b, h, tile * 128 + half * 64, 0], q_smem.index(half))
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(half))


@gluon.jit
def hopper_kernel(
    q, k, v, out, packed_k, packed_v, weight_ptr, packed_ptr, index_ptr, count_ptr,
    index_batch, index_head, index_row, items, heads, group, tiles, keys, row0, step, critical, chunk,
    packed_slots, chunk_slots, scale,
    MODE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the three roles. Shapes and orders: `launch`."""
    q_smem = gl.allocate_shared_memory(q.dtype, [2, 1, 1, 64, D], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, 128, D], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, 128, D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(q_full.index(half), count=1)
        mbarrier.init(q_empty.index(half), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    buffers = (q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    p = (count_ptr, packed_ptr, heads, group, tiles, keys, row0, step, critical, chunk, chunk_slots)
    index = (index_ptr, index_batch, index_head, index_row)
    gl.warp_specialize(
        [
            (_compute, (0, out, weight_ptr, packed_slots, scale, buffers, items, p, MODE, D, STAGES)),
            (_compute, (1, out, weight_ptr, packed_slots, scale, buffers, items, p, MODE, D, STAGES)),
            (_load, (q, k, v, packed_k, packed_v, index, buffers, items, p, MODE, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def launch(x: AttentionInput, rows: Rows, *, mask: TileMask | None, packed: Packed | None) -> None:
    """See `launch.launch`; x and rows satisfy `launch.takes_hopper`."""
    batch, heads, count, dim = rows.q_BHRD.shape
    tiles = triton.cdiv(count, BLOCK)
    items = batch * heads * tiles
    q, out = _descriptor(rows.q_BHRD, 64), _descriptor(rows.out_BHRD, 64)
    k, v = _descriptor(x.k_BGSD, BLOCK), _descriptor(x.v_BGSD, BLOCK)
    none = x.k_BGSD.new_empty(1, dtype=torch.int32) if mask is None or packed is None else None
    programs = torch.cuda.get_device_properties(x.q_BHTD.device).multi_processor_count
    hopper_kernel[(min(items, programs),)](
        q,
        k,
        v,
        out,
        k if packed is None else _descriptor(packed.k_BGPD, BLOCK),
        v if packed is None else _descriptor(packed.v_BGPD, BLOCK),
        none if packed is None else packed.weight_BGP,
        none if packed is None else packed.offset_BGC,
        none if mask is None else mask.index_BHNM,
        none if mask is None else mask.count_BHN.contiguous(),
        *((0, 0, 0) if mask is None else mask.index_BHNM.stride()[:3]),
        items,
        heads,
        x.group,
        tiles,
        x.k_BGSD.shape[2],
        rows.row0,
        rows.step,
        0 if packed is None else packed.critical,
        BLOCK if packed is None else packed.chunk,
        0 if packed is None else packed.weight_BGP.shape[2],
        0 if packed is None else packed.offset_BGC.shape[2],
        x.scale * LOG2E,
        MODE=RANGE if mask is None and packed is None else LIST if packed is None else PACKED,
        D=dim,
        STAGES=2 if dim == 128 else 4,
        REGISTERS=240,
        num_warps=4,
    )


def _descriptor(t: torch.Tensor, block: int) -> TensorDescriptor:
    """How the copy engine sees t: tiles of `block` rows of one head. Strides of single entries do not matter."""
    dim = t.shape[3]
    strides = [s if n > 1 else dim for s, n in zip(t.stride()[:3], t.shape[:3], strict=True)]
    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[t.dtype]
    shape = [1, 1, block, dim]
    layout = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    return TensorDescriptor(t, list(t.shape), [*strides, 1], shape, layout)
