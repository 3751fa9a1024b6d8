"""What of a launch of the Hopper kernel is known when it is compiled, and why. See `flash_hopper.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ...hopper.layouts import WARPGROUP_ROWS

ONE_HEAD_FIRST, LONGEST_ROWS_FIRST, BY_LENGTH = 0, 1, 2
"""Orders of the items: one key head's rows after another's; the longest rows of all heads first; the longest
lists of all first, from a sorted table."""


@dataclass(frozen=True)
class HopperPlan:
    """The kernel's one compile-time argument. Neither listed nor packed: a row sees every key up to itself.

    What follows `order` is what was fastest for it (docs/log/2026-11-21.md).
    """

    dim: int
    listed: bool
    """The tiles of a mask."""
    packed: bool
    """Packed keys before the critical region, then every key."""
    order: int
    stages: int
    """Buffers for tiles of keys, and for tiles of values."""
    warpgroups: int
    """That compute, each WARPGROUP_ROWS of an item's rows."""
    query_buffers: int
    """For each warpgroup. With two, an item's output leaves while the next item is computed."""
    registers: int
    """A thread of a computing warpgroup."""
    copying_registers: int
    """A thread of the copying warp."""
    in_pairs: bool
    """Hand weights on as 32-bit numbers that hold two. An item's tiles then take several loops: between loops
    LLVM keeps 16-bit numbers apart and has 64 instructions put them together for every tile."""
    late_rescale: bool
    """Round weights and shrink the sums while the next scores are made, and wait for the weighted sum after
    the next exponentials."""
    l_i_in_threads: bool
    """Let each of a row's four threads add up its weights until the item's end."""

    @property
    def rows(self) -> int:
        """Of an item."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def by_length(self) -> bool:
        return self.order == BY_LENGTH

    @property
    def one_head_first(self) -> bool:
        return self.order == ONE_HEAD_FIRST


@cache
def plan_of(
    dim: int, *, listed: bool = False, packed: bool = False, order: int = ONE_HEAD_FIRST
) -> HopperPlan:
    """The fastest that fits. Three warpgroups have too few registers at D 128, and a list's tile has the rows
    of two."""
    if listed:
        stages, warpgroups, query_buffers, registers = 2, 2, 2, 240
    elif dim == 64:
        stages, warpgroups, query_buffers, registers = 4, 3, 1, 160
    else:
        stages, warpgroups, query_buffers, registers = 3, 2, 1, 240
    return HopperPlan(
        dim=dim,
        listed=listed,
        packed=packed,
        order=order,
        stages=stages,
        warpgroups=warpgroups,
        query_buffers=query_buffers,
        registers=registers,
        copying_registers=24,
        in_pairs=dim == 64 if packed else dim == 128 and not listed,
        late_rescale=packed and dim == 128,
        l_i_in_threads=listed or (packed and dim == 64),
    )
