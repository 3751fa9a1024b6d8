"""Which tiles a program of the Hopper kernel visits, and the warp that copies them. See `flash_hopper.py`.

An item is a tile of 64 rows for each computing warpgroup. Leading items (a prompt's dense tail) come first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def item_of(turn, items):
    """The item that this program takes in its turn; at least `items` when there is none."""
    programs = gl.num_programs(0)
    lane = gl.program_id(0)
    lane = gl.where(turn % 2 == 1, programs - 1 - lane, lane)
    return turn * programs + lane


@gluon.jit
def place_of(item, shape, ORDER: gl.constexpr):
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
def extent_of(b, h, g, tile, lead, shape, spans, tables, MODE: gl.constexpr, ROWS: gl.constexpr):
    """First position and step; tiles in all, exact and masked; first exact and masked one; packed rows."""
    _, heads, group, tiles, _ = shape
    keys, row0, step, lead_row0, critical, chunk = spans
    count_ptr, packed_ptr, chunk_slots = tables
    step = gl.where(lead, 1, step)
    first = gl.where(lead, lead_row0, row0) + step * tile * ROWS
    end = gl.minimum(first + step * (ROWS - 1), keys - 1) // 128 + 1
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
def load_items(
    sources, index, buffers, work,
    MODE: gl.constexpr, ORDER: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """The copying warp: for each item its queries, then keys and values tile by tile."""
    q, k, v, q_lead, packed_k, packed_v, weight = sources
    items, shape, spans, tables = work
    index_ptr, index_batch, index_head, index_row = index
    q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    done = 0
    taken = 0
    for turn in range((items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = item_of(turn, items)
        if item < items:
            b, h, g, tile, lead = place_of(item, shape, ORDER)
            _, _, total, exact, masked, begin, whole, _ = extent_of(
                b, h, g, tile, lead, shape, spans, tables, MODE, 64 * GROUPS
            )
            for half in gl.static_range(GROUPS):
                row = (tile * GROUPS + half) * 64
                buffer = half * AHEAD + taken % AHEAD
                full, smem = q_full.index(buffer), q_smem.index(buffer)
                mbarrier.wait(q_empty.index(buffer), ((taken // AHEAD) & 1) ^ 1)
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
