"""Launches the Hopper attention kernel: TMA descriptors, split keys, order of the work items, grid."""

from functools import cache

import torch

from deltafront.kernels.attention.hopper.attention import hopper_kernel
from deltafront.kernels.attention.hopper.hopper_plan import (
    BY_LENGTH,
    LONGEST_ROWS_FIRST,
    ONE_HEAD_FIRST,
    plan_of,
)
from deltafront.kernels.attention.hopper.split import few, merge_splits, splits_of
from deltafront.kernels.attention.inputs import PackedKeys, QueryRows
from deltafront.kernels.constants import BLOCK, LOG2E
from deltafront.kernels.hopper.host import TileDescriptor, is_hopper, multiprocessors
from deltafront.kernels.hopper.layouts import WARPGROUP_ROWS
from deltafront.kernels.interface import AttentionInput, TileMask
from deltafront.kernels.launches import Launcher, cdiv, next_power_of_2, strides

_attend = Launcher(hopper_kernel)


def takes(x: AttentionInput, rows: QueryRows) -> bool:
    """Say whether the kernel supports x: Hopper, a 16-bit dtype, D 64 or 128, strides of 16 bytes."""
    if not x.q_BHTD.is_cuda or not is_hopper(x.q_BHTD.device):
        return False
    if x.q_BHTD.dtype == torch.float32 or x.q_BHTD.shape[3] not in (64, 128):
        return False
    return all(_copyable(t) for t in (rows.q_BHRD, rows.out_BHRD, x.k_BGSD, x.v_BGSD))


def _copyable(t: torch.Tensor) -> bool:
    steps = [s * t.element_size() for s, n in zip(t.stride()[:3], t.shape[:3], strict=True) if n > 1]
    return t.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)


def launch(
    x: AttentionInput,
    rows: QueryRows,
    tail: QueryRows | None,
    *,
    mask: TileMask | None,
    packed: PackedKeys | None,
) -> None:
    """Run `attention.launch.launch` with the Hopper kernel. Inputs must satisfy `takes`.

    Where the items would leave half of the multiprocessors idle, their keys are split.
    """
    batch, heads, count, dim = rows.q_BHRD.shape
    kind = {"listed": mask is not None, "packed": packed is not None}
    item_rows = plan_of(dim, **kind).rows
    tiles = cdiv(count, item_rows)
    tail_tiles = 0 if tail is None else cdiv(tail.q_BHRD.shape[2], item_rows)
    items = batch * heads * (tiles + tail_tiles)
    programs = multiprocessors(x.q_BHTD.device)
    if mask is None and packed is None and few(items, programs):
        for each in (rows,) if tail is None else (rows, tail):
            _launch_split(x, each, programs)
        return
    q, out = _descriptor(rows.q_BHRD, WARPGROUP_ROWS), _descriptor(rows.out_BHRD, WARPGROUP_ROWS)
    k, v = _descriptor(x.k_BGSD, BLOCK), _descriptor(x.v_BGSD, BLOCK)
    tail_rows: tuple[TileDescriptor, ...] = (q, out)
    tail_row0 = 0
    if tail is not None:
        own = (_descriptor(t, WARPGROUP_ROWS) for t in (tail.q_BHRD, tail.out_BHRD))
        tail_rows, tail_row0 = tuple(own), tail.row0
    order = _order(x, rows, mask, items // programs)
    unused = x.k_BGSD.new_empty(1, dtype=torch.int32) if mask is None or packed is None else None
    runs: tuple[TileDescriptor, ...] = (k, v, k)
    offsets, run_sizes = unused, (0, BLOCK, 0)
    if packed is not None:
        runs = tuple(_descriptor(t, BLOCK) for t in (packed.k_BGPD, packed.v_BGPD, packed.weight_BGP))
        offsets, run_sizes = packed.offset_BGC, (packed.critical, packed.chunk, packed.offset_BGC.shape[2])
    index, counts, list_strides = unused, unused, [0, 0, 0]
    if mask is not None:
        index, list_strides = mask.index_BHNM, strides(mask.index_BHNM)
        counts = by_length(mask) if order == BY_LENGTH else mask.count_BHN.contiguous()
    counter = torch.zeros(1, dtype=torch.int32, device=x.q_BHTD.device)
    tensors = (q, k, v, out, *tail_rows, *runs, offsets, index, counts, counter, counter)
    sizes = (items, batch, heads, x.group, tiles, tail_tiles, x.k_BGSD.shape[2], rows.row0, rows.step)
    _attend[(min(items, programs),)](
        *tensors,
        *list_strides,
        *sizes,
        tail_row0,
        *run_sizes,
        1,
        count,
        x.scale * LOG2E,
        PLAN=plan_of(dim, **kind, order=order),
        num_warps=4,
    )


def _launch_split(x: AttentionInput, rows: QueryRows, programs: int) -> None:
    """Compute attention of few rows over all causal keys in splits, and merge these."""
    batch, heads, count, dim = rows.q_BHRD.shape
    plan, keys = plan_of(dim, order=LONGEST_ROWS_FIRST, split=True), x.k_BGSD.shape[2]
    tiles = cdiv(count, plan.rows)

    def key_tiles(row: int) -> int:
        return min(rows.row0 + rows.step * row, keys - 1) // BLOCK + 1

    splits = splits_of(
        batch * heads * tiles, key_tiles(tiles * plan.rows - 1), key_tiles(plan.rows - 1), programs
    )
    split_PHRD = rows.q_BHRD.new_empty(batch * splits, heads, count, dim)
    lse_PHR = rows.q_BHRD.new_empty(batch * splits, heads, count, dtype=torch.float32)
    q, out = (_descriptor(t, WARPGROUP_ROWS) for t in (rows.q_BHRD, split_PHRD))
    k, v = (_descriptor(t, BLOCK) for t in (x.k_BGSD, x.v_BGSD))
    counter = torch.zeros(1, dtype=torch.int32, device=x.q_BHTD.device)
    items = batch * heads * tiles * splits
    _attend[(min(items, programs),)](
        *(q, k, v, out, q, out, k, v, k, counter, counter, counter, counter, lse_PHR),
        *(0, 0, 0, items, batch, heads, x.group, tiles * splits, 0, keys, rows.row0, rows.step),
        *(0, 0, BLOCK, 0, splits, count),
        x.scale * LOG2E,
        PLAN=plan,
        num_warps=4,
    )
    merge_splits(split_PHRD, lse_PHR, rows.out_BHRD)


def _order(x: AttentionInput, rows: QueryRows, mask: TileMask | None, rounds: int) -> int:
    """Choose the order of the work items. rounds: items per program.

    LONGEST_ROWS_FIRST balances the load, but reads the keys of all KV heads at once. So it is used for at
    most 48 MiB of keys and values with a mask, 96 MiB without, and for strided rows.
    """
    if mask is not None and rounds < 48:
        return BY_LENGTH
    size = 2 * x.k_BGSD.numel() * x.k_BGSD.element_size()
    light = size <= (48 if mask is not None else 96) << 20
    return LONGEST_ROWS_FIRST if rows.step > 1 or light else ONE_HEAD_FIRST


def by_length(mask: TileMask) -> torch.Tensor:
    """Return an entry (`items.py`) per tile list, the longest list first. Numbers are in (B, H, N) order."""
    count = mask.count_BHN.reshape(-1)
    place = _numbers(next_power_of_2(count.numel()), count.device)[: count.numel()]
    entries = torch.add(place, count, alpha=1 << 32)
    return entries.sort(descending=True).values


@cache
def _numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64, device=device)


def _descriptor(t: torch.Tensor, block: int) -> TileDescriptor:
    """Make a TMA descriptor for tiles of `block` rows of one head, or of `block` numbers if t has no D.
    Strides of size-1 dimensions do not matter."""
    strides = [s if n > 1 else 128 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True)]
    shape = (1, 1, block, t.shape[3]) if t.dim() == 4 else (1, 1, block)
    return TileDescriptor(t, t.shape, [*strides, 1], shape)
