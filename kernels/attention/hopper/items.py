"""The work items and key tiles that a program of the Hopper kernel visits, and the producer warp.

An *item* is a tile of PLAN.rows rows of one query head. Items of tail rows come first. An *entry* encodes an
item as an int64: the item's number in the lower 32 bits, with LISTED the length of its tile list in the upper
32. A negative entry ends the program. An item's key tiles come in this order: *masked* ones at the diagonal,
other tiles of exact keys, tiles of packed keys. LISTED, PACKED and SPLIT are compile-time flags: over the
tiles of a mask, over packed keys, one split of the key tiles in each item.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from deltafront.kernels.hopper.layouts import GROUP_ROWS, TILE


class Work(NamedTuple):
    """Sizes of one launch. Row i has the position row0 + step * i."""

    items: gl.tensor
    batch: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # query heads of a key head
    tiles: gl.tensor  # items of a query head; (SPLIT) all splits of a tile of rows count
    tail_tiles: gl.tensor  # tail items of a query head
    keys: gl.tensor
    row0: gl.tensor
    step: gl.tensor
    tail_row0: gl.tensor
    critical: gl.tensor  # (PACKED) exact keys before a block of rows
    chunk: gl.tensor  # (PACKED) keys of a pack chunk
    packed_ptr: gl.tensor  # (PACKED) packed keys before each chunk, (B, G, C)
    chunk_slots: gl.tensor  # (PACKED) the size of dimension C
    splits: gl.tensor  # (SPLIT) splits of an item's key tiles
    rows: gl.tensor  # (SPLIT) rows of a query head


class Lists(NamedTuple):
    """Pointers to entries and tile lists. `counter_ptr` counts the items taken after each program's first."""

    order_ptr: gl.tensor  # (LISTED) lengths of the lists, or (by_length) sorted entries
    counter_ptr: gl.tensor
    index_ptr: gl.tensor  # (LISTED) each list's blocks of keys, (B, H, N, M)
    stride_ib: gl.tensor
    stride_ih: gl.tensor
    stride_in: gl.tensor


class Sources(NamedTuple):
    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    q_tail: tma.tensor_descriptor
    packed_k: tma.tensor_descriptor
    packed_v: tma.tensor_descriptor
    weight: tma.tensor_descriptor


class Item(NamedTuple):
    """A decoded work item. list_tiles: (LISTED) number of tiles in its list. split: (SPLIT) which split."""

    b: gl.tensor
    h: gl.tensor
    g: gl.tensor
    tile: gl.tensor
    tail: gl.tensor
    list_tiles: gl.tensor
    split: gl.tensor


class Extent(NamedTuple):
    first: gl.tensor  # position of the first row
    step: gl.tensor  # from one row's position to the next's
    begin: gl.tensor  # the item's first tile: 0, or (SPLIT) its split's
    tiles: gl.tensor  # all tiles, or (SPLIT) the end of its split
    exact: gl.tensor  # tiles of exact keys
    masked: gl.tensor  # masked tiles among the exact ones
    masked_block: gl.tensor  # key block of the first masked tile
    exact_block: gl.tensor  # key block of the first other exact tile (not LISTED)


@gluon.jit
def _publish(entry, taken, entries):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    entries.wait_empty(taken)
    entries.buffer(taken).store(gl.zeros([1], gl.int64, layout=layout) + entry)
    mbarrier.arrive(entries.when_full(taken))


@gluon.jit
def next_entry(taken, entries):
    """Wait for the producer's entry number `taken`, release its buffer, and return the entry."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    entries.wait_full(taken)
    entry = gl.max(entries.buffer(taken).load(layout), 0)
    entries.release(taken)
    return entry


@gluon.jit
def item_of(entry, work, PLAN: gl.constexpr):
    """Decode an entry. Items are in the plan's order (`hopper_plan.py`)."""
    key_heads = work.heads // work.group
    tail_items = work.batch * work.heads * work.tail_tiles
    item = entry.to(gl.int32)
    tail = item < tail_items
    list_tiles = (entry >> 32).to(gl.int32)
    if PLAN.by_length:
        tile = item % work.tiles
        h = item // work.tiles % work.heads
        b = item // work.tiles // work.heads
    else:
        if not tail:
            item -= tail_items
        count = gl.where(tail, work.tail_tiles, work.tiles)
        if PLAN.one_head_first:
            pair = item // (count * work.group)
            tile = count - 1 - item % (count * work.group) // work.group
        else:
            tile = count - 1 - item // (work.batch * work.heads)
            pair = item % (work.batch * work.heads) // work.group
        h = pair % key_heads * work.group + item % work.group
        b = pair // key_heads
    split = 0
    if PLAN.split:
        split = tile % work.splits
        tile = tile // work.splits
    return Item(b, h, h // work.group, tile, tail, list_tiles, split)


@gluon.jit
def packed_before(row, item, work):
    """(PACKED) For the block of 128 rows that contains position `row`, return its first exact key and the
    number of packed keys before that key."""
    chunks = gl.maximum(row // TILE * TILE - work.critical, 0) // work.chunk
    head = item.b * (work.heads // work.group) + item.g
    return chunks * work.chunk, gl.load(work.packed_ptr + head * work.chunk_slots + chunks)


@gluon.jit
def extent_of(item, work, PLAN: gl.constexpr):
    """Return an item's key tiles. With packed keys, an item may span two blocks of 128 rows; it then has the
    key tiles of both. A split needs at least one tile: the launch has no more splits than tiles."""
    step = gl.where(item.tail, 1, work.step)
    first = gl.where(item.tail, work.tail_row0, work.row0) + step * item.tile * PLAN.rows
    end = gl.minimum(first + step * (PLAN.rows - 1), work.keys - 1) // TILE + 1
    masked_block = gl.minimum((first + 1) // TILE, end - 1)
    begin = 0
    tiles = end
    exact = end
    exact_block = 0
    if PLAN.split:
        begin = end * item.split // work.splits
        tiles = end * (item.split + 1) // work.splits
    if PLAN.listed:
        tiles = item.list_tiles
        exact = item.list_tiles
    if PLAN.packed:
        exact_from, _ = packed_before(first, item, work)
        exact_block = exact_from // TILE
        _, packed = packed_before(gl.minimum(first + PLAN.rows, work.keys) - 1, item, work)
        masked_block = gl.maximum(masked_block, exact_block)
        exact = end - exact_block
        tiles = exact + (packed + TILE - 1) // TILE
    return Extent(first, step, begin, tiles, exact, end - masked_block, masked_block, exact_block)


@gluon.jit
def exact_key(i, extent):
    """Return the position of the first key in an item's i-th tile, which must be exact (not LISTED)."""
    before = extent.masked
    block = gl.where(i < before, extent.masked_block + i, extent.exact_block + i - before)
    return block * TILE


@gluon.jit
def _copy(
    exact, packed, place, packed_row, is_exact, full, buffer, PLAN: gl.constexpr, MORE: gl.constexpr = 0
):
    """Start copying a tile of keys or values from the sequence or (PACKED) from the packed keys.

    MORE: further bytes that the barrier `full` waits for.
    """
    b, g, row = place
    mbarrier.expect(full, exact.block_type.nbytes + MORE)
    if PLAN.packed:
        tma.async_copy_global_to_shared(exact, [b, g, row, 0], full, buffer, pred=is_exact)
        tma.async_copy_global_to_shared(packed, [b, g, packed_row, 0], full, buffer, pred=is_exact == 0)
    else:
        tma.async_copy_global_to_shared(exact, [b, g, row, 0], full, buffer)


@gluon.jit
def _copy_queries(item, taken, sources, queries, PLAN: gl.constexpr):
    WARPGROUPS: gl.constexpr = PLAN.warpgroups
    for warpgroup in gl.static_range(WARPGROUPS):
        row = (item.tile * WARPGROUPS + warpgroup) * GROUP_ROWS
        ring = queries.part(warpgroup)
        full, buffer = ring.when_full(taken), ring.buffer(taken)
        ring.wait_empty(taken)
        mbarrier.expect(full, sources.q.block_type.nbytes)
        place = [item.b, item.h, row, 0]
        tma.async_copy_global_to_shared(sources.q, place, full, buffer, pred=item.tail == 0)
        tma.async_copy_global_to_shared(sources.q_tail, place, full, buffer, pred=item.tail)


@gluon.jit
def load_items(sources, lists, buffers, work, PLAN: gl.constexpr):
    """Run the producer warp: take items, then copy their queries, keys and values. done: tiles copied so far;
    taken: items taken so far."""
    done = 0
    taken = 0
    number = gl.program_id(0)
    while number < work.items:
        entry = number.to(gl.int64)
        if PLAN.by_length:
            entry = gl.load(lists.order_ptr + number)
        elif PLAN.listed:
            item = item_of(entry, work, PLAN)
            list_tiles = gl.load(lists.order_ptr + (item.b * work.heads + item.h) * work.tiles + item.tile)
            entry += list_tiles.to(gl.int64) << 32
        _publish(entry, taken, buffers.entries)
        item = item_of(entry, work, PLAN)
        extent = extent_of(item, work, PLAN)
        _copy_queries(item, taken, sources, buffers.q, PLAN)
        taken += 1
        list_ptr = (
            lists.index_ptr
            + item.b.to(gl.int64) * lists.stride_ib
            + item.h.to(gl.int64) * lists.stride_ih
            + item.tile * lists.stride_in
        )
        for i in range(extent.begin, extent.tiles):
            if PLAN.listed:  # the diagonal tile is last in the list and is computed first
                row = gl.load(list_ptr + gl.where(i == 0, extent.tiles - 1, i - 1)).to(gl.int32) * TILE
            else:
                row = exact_key(i, extent)
            place = (item.b, item.g, row)
            packed_row = (i - extent.exact) * TILE
            buffers.k.wait_empty(done)
            exact = i < extent.exact
            k_full, k_buffer = buffers.k.when_full(done), buffers.k.buffer(done)
            if PLAN.packed:
                _copy(
                    sources.k, sources.packed_k, place, packed_row, exact, k_full, k_buffer, PLAN,
                    sources.weight.block_type.nbytes,
                )  # fmt: skip
                # Exact keys' weights are the last tile, all ones: `inputs.PackedKeys`.
                ones = sources.weight.shape[2].to(gl.int32) - TILE
                lengths = buffers.lengths.index(done % PLAN.stages)
                tma.async_copy_global_to_shared(
                    sources.weight, [item.b, item.g, gl.where(exact, ones, packed_row)], k_full, lengths
                )
            else:
                _copy(sources.k, sources.packed_k, place, packed_row, exact, k_full, k_buffer, PLAN)
            buffers.v.wait_empty(done)
            v_full, v_buffer = buffers.v.when_full(done), buffers.v.buffer(done)
            _copy(sources.v, sources.packed_v, place, packed_row, exact, v_full, v_buffer, PLAN)
            done += 1
        number = gl.num_programs(0) + gl.atomic_add(lists.counter_ptr, 1, sem="relaxed")
    _publish(gl.to_tensor(-1).to(gl.int64), taken, buffers.entries)
