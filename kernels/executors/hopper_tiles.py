"""Which tiles a program of the Hopper kernel visits, and the warp that copies them. See `flash_hopper.py`.

An item is a tile of 64 rows for each computing warpgroup. Leading items (a prompt's dense tail) come first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def _publish(entry, taken, turns):
    """Tell the computing warpgroups which item comes next."""
    told, told_full, told_empty = turns
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(told_empty.index(taken % 2), ((taken // 2) & 1) ^ 1)
    told.index(taken % 2).store(gl.zeros([1], gl.int64, layout=one) + entry)
    mbarrier.arrive(told_full.index(taken % 2))


@gluon.jit
def next_entry(taken, turns):
    """The item that the copying warp has published in this turn; less than 0 when there is none."""
    told, told_full, told_empty = turns
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(told_full.index(taken % 2), (taken // 2) & 1)
    entry = gl.max(told.index(taken % 2).load(one), 0)
    mbarrier.arrive(told_empty.index(taken % 2))
    return entry


@gluon.jit
def place_of(entry, shape, ORDER: gl.constexpr):
    """Batch, query head, key head, row tile of an item, whether it is one of the leading rows, and (LIST) how
    many tiles its list has.

    entry: the item's number in the lower half, the length of its list in the upper. ORDER: see
    `hopper_launch.py`.
    """
    batch, heads, group, tiles, lead_tiles = shape
    key_heads = heads // group
    lead_items = batch * heads * lead_tiles
    item = entry.to(gl.int32)
    lead = item < lead_items
    kept = (entry >> 32).to(gl.int32)
    if ORDER == 2:
        tile = item % tiles
        h = item // tiles % heads
        b = item // tiles // heads
    else:
        if not lead:
            item -= lead_items
        count = gl.where(lead, lead_tiles, tiles)
        if ORDER == 0:
            pair = item // (count * group)
            tile = count - 1 - item % (count * group) // group
        else:
            tile = count - 1 - item // (batch * heads)
            pair = item % (batch * heads) // group
        h = pair % key_heads * group + item % group
        b = pair // key_heads
    return b, h, h // group, tile, lead, kept


@gluon.jit
def packed_before(row, place, shape, spans, tables):
    """(PACKED) From which key on the block of 128 rows around position `row` is exact; packed rows before."""
    b, _, g, _, _, _ = place
    _, heads, group, _, _ = shape
    _, _, _, _, critical, chunk = spans
    packed_ptr, chunk_slots = tables
    chunks = gl.maximum(row // 128 * 128 - critical, 0) // chunk
    return chunks * chunk, gl.load(packed_ptr + (b * (heads // group) + g) * chunk_slots + chunks)


@gluon.jit
def extent_of(place, shape, spans, tables, MODE: gl.constexpr, ROWS: gl.constexpr):
    """First position and step; tiles in all, exact and masked; first exact and masked one; packed rows.

    A PACKED item may begin in one block of 128 rows and end in another: its tiles are those of both.
    """
    _, _, _, tile, lead, kept = place
    keys, row0, step, lead_row0, _, _ = spans
    step = gl.where(lead, 1, step)
    first = gl.where(lead, lead_row0, row0) + step * tile * ROWS
    end = gl.minimum(first + step * (ROWS - 1), keys - 1) // 128 + 1
    whole = gl.minimum((first + 1) // 128, end - 1)
    total = end
    exact = end
    begin = 0
    packed = 0
    if MODE == 1:
        total = kept
        exact = kept
    if MODE == 2:
        begin, _ = packed_before(first, place, shape, spans, tables)
        begin = begin // 128
        _, packed = packed_before(gl.minimum(first + ROWS, keys) - 1, place, shape, spans, tables)
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
    sources, index, buffers, work, turns,
    MODE: gl.constexpr, ORDER: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """The copying warp: takes items and copies their queries, then keys and values tile by tile.

    The first item of a program is its own number, then all take from one counter, so that a program with
    short items takes more of them. order_ptr: the lists' counts, or (ORDER 2) their entries, longest first.
    """
    q, k, v, q_lead, packed_k, packed_v, weight = sources
    items, shape, spans, tables = work
    _, heads, _, tiles, _ = shape
    order_ptr, counter_ptr, index_ptr, index_batch, index_head, index_row = index
    q_smem, k_smem, v_smem, w_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = buffers
    done = 0
    taken = 0
    item = gl.program_id(0)
    while item < items:
        entry = item.to(gl.int64)
        if ORDER == 2:
            entry = gl.load(order_ptr + item)
        elif MODE == 1:
            b, h, _, tile, _, _ = place_of(entry, shape, ORDER)
            entry += gl.load(order_ptr + (b * heads + h) * tiles + tile).to(gl.int64) << 32
        _publish(entry, taken, turns)
        at = place_of(entry, shape, ORDER)
        b, h, g, tile, lead, _ = at
        _, _, total, exact, masked, begin, whole, _ = extent_of(at, shape, spans, tables, MODE, 64 * GROUPS)
        for half in gl.static_range(GROUPS):
            row = (tile * GROUPS + half) * 64
            buffer = half * AHEAD + taken % AHEAD
            full, smem = q_full.index(buffer), q_smem.index(buffer)
            mbarrier.wait(q_empty.index(buffer), ((taken // AHEAD) & 1) ^ 1)
            mbarrier.expect(full, q.block_type.nbytes)
            tma.async_copy_global_to_shared(q, [b, h, row, 0], full, smem, pred=lead == 0)
            tma.async_copy_global_to_shared(q_lead, [b, h, row, 0], full, smem, pred=lead)
        taken += 1
        entry_ptr = index_ptr + b.to(gl.int64) * index_batch + h.to(gl.int64) * index_head + tile * index_row
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
                # Exact keys' weights are the last tile, all ones: see `launch.Packed`.
                lengths = [b, g, gl.where(i < exact, weight.shape[2].to(gl.int32) - 128, far_row)]
                tma.async_copy_global_to_shared(weight, lengths, full, w_smem.index(stage))
            else:
                _copy(k, packed_k, place, far_row, i < exact, full, k_smem.index(stage), MODE)
            mbarrier.wait(v_empty.index(stage), phase)
            _copy(v, packed_v, place, far_row, i < exact, v_full.index(stage), v_smem.index(stage), MODE)
            done += 1
        item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
    _publish(gl.to_tensor(-1).to(gl.int64), taken, turns)
