"""Compile-time choices of the Hopper attention kernel."""

from dataclasses import dataclass
from functools import cache

from deltafront.kernels.hopper.layouts import WARPGROUP_ROWS

ONE_HEAD_FIRST, LONGEST_ROWS_FIRST, BY_LENGTH = 0, 1, 2
"""Orders in which programs take work items: one key head after the other; the rows with most keys first, of
all heads; the longest tile lists first."""


@dataclass(frozen=True)
class HopperPlan:
    """The kernel's only compile-time argument. The values of fields after `order` were tuned by measurements
    (docs/log/2026-11-21.md at 4fe709c6)."""

    dim: int
    listed: bool
    packed: bool
    order: int
    stages: int
    """Shared-memory buffers for key tiles, and as many for value tiles."""
    warpgroups: int
    """Consumer warpgroups. Each computes 64 rows of an item."""
    query_buffers: int
    """Buffers for the queries of one warpgroup."""
    registers: int
    copying_registers: int
    in_pairs: bool
    """Pack two 16-bit softmax weights into one register between loops. LLVM would use two registers."""
    late_rescale: bool
    """Round softmax weights and rescale acc while the next tile's scores are computed."""
    l_i_in_threads: bool
    """Keep a separate sum of weights in each of a row's four threads until the item ends."""
    split: bool
    """Cut each item's key tiles into splits, which are items of their own (`split.py`)."""

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
    dim: int,
    *,
    listed: bool = False,
    packed: bool = False,
    order: int = ONE_HEAD_FIRST,
    split: bool = False,
) -> HopperPlan:
    """Choose the compile-time options. `split` needs exact keys: neither a mask nor packed keys."""
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
        split=split,
    )
