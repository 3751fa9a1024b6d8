"""Compile-time choices of the Hopper attention kernel, with their reasons."""

from dataclasses import dataclass
from functools import cache

from deltafront.kernels.hopper.layouts import WARPGROUP_ROWS

ONE_HEAD_FIRST, LONGEST_ROWS_FIRST, BY_LENGTH = 0, 1, 2
"""Orders of the items: by key head; longest rows of all heads first; longest lists first."""


@dataclass(frozen=True)
class HopperPlan:
    """The kernel's one compile-time argument. Measurements chose the fields after `order`
    (docs/log/2026-11-21.md at 4fe709c6)."""

    dim: int
    listed: bool
    packed: bool
    order: int
    stages: int
    """Buffers for tiles of keys, and for tiles of values."""
    warpgroups: int
    """Consumer warpgroups, each with 64 rows of an item."""
    query_buffers: int
    """Buffers for the queries of one warpgroup."""
    registers: int
    copying_registers: int
    in_pairs: bool
    """Keep two 16-bit weights in one 32-bit register between an item's loops. LLVM would keep them in two."""
    late_rescale: bool
    """Round weights and rescale acc while the next scores are computed."""
    l_i_in_threads: bool
    """Let each of a row's four threads sum its own weights until the item's end."""

    @property
    def rows(self) -> int:
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
