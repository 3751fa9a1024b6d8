"""Cuts a prompt into chunks: few, so that chunks' fixed cost stays small, and short, so that stages wait
little for the first and the last. Pure.

Equal stages form a proportionate flow shop: it takes the sum of the chunks' times and (stages - 1) times the
longest, so chunks should take equally long. Attention makes later tokens dearer, so later chunks have fewer.
Where later stages are faster, chunks should grow shorter, so that the last wait is short. Where they are
slower, chunks should grow longer, so that the last stage begins sooner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from ....kernels.constants import BLOCK
from ...messages.methods import MethodSpec
from ..stage.chunk_cost import ChunkCost, ModelWork

_REMEMBERED = 64
_TRIES = 8
_HALVINGS = 5
_GROWTHS = (0.88, 0.93, 0.96, 0.98, 1.02, 1.05)
"""Ratios of a chunk's time to the one before it that are tried, besides 1."""
_MORE = (1.0, 1.25, 1.6)
"""Multiples of the best number of equal chunks that are tried."""
_MANY = 1000
"""With more chunks the last one is too short to matter, and a power of growth may overflow."""


class ChunkSizes:
    """Without `work`, as on a CPU, all chunks are `largest`."""

    def __init__(self, largest: int, work: ModelWork | None = None) -> None:
        self._largest, self._work = largest, work
        self._planned = lru_cache(_REMEMBERED)(self._plan)

    def of(self, method: MethodSpec, start: int, tokens: int) -> tuple[int, ...]:
        """Cut tokens start .. tokens-1."""
        if self._work is None:
            return even_chunks(start, tokens, self._largest)
        return self._planned(self._work.chunk_cost(method), start, tokens)

    def _plan(self, cost: ChunkCost, start: int, tokens: int) -> tuple[int, ...]:
        return plan_chunks(start, tokens, self._largest, cost)


def even_chunks(start: int, tokens: int, largest: int) -> tuple[int, ...]:
    full, rest = divmod(tokens - start, largest)
    return (largest,) * full + (rest,) * (rest > 0)


def plan_chunks(start: int, tokens: int, largest: int, cost: ChunkCost) -> tuple[int, ...]:
    """Return the sizes of the chunks of tokens start .. tokens-1: multiples of a block but for the last, and
    at most `largest`.

    Their time is within 1% of the shortest where stages are equal, and within 3% where they are not.
    """
    best = even_chunks(start, tokens, largest)
    if len(cost.stages) == 1 or len(best) == 0:
        return best
    least, chosen = takes(best, start, cost), len(best)
    for count in _counts(start, tokens, len(best), cost):
        sizes = _shortest(start, tokens, count, largest, 1.0, cost)
        time = takes(sizes, start, cost)
        if time < least:
            best, least, chosen = sizes, time, count
    if cost.alike or chosen > _MANY:
        return best
    for growth, more in product(_GROWTHS, _MORE):
        sizes = _shortest(start, tokens, round(chosen * more), largest, growth, cost)
        time = takes(sizes, start, cost)
        if time < least:
            best, least = sizes, time
    return best


def takes(sizes: Sequence[int], start: int, cost: ChunkCost) -> float:
    """Return the time from the first chunk's start to the last one's end, in `StageCost`'s unit. A stage
    begins a chunk when it and the stage before are done with theirs."""
    free = [0.0] * len(cost.stages)
    for size in sizes:
        arrived = 0.0
        for number, stage in enumerate(cost.stages):
            arrived = free[number] = max(free[number], arrived) + stage.of(start, size)
        start += size
    return free[-1]


def _counts(start: int, tokens: int, fewest: int, cost: ChunkCost) -> list[int]:
    """Numbers of chunks around the optimum of a prompt that could be cut anywhere. The time is flat there."""
    bare = cost.of(start, tokens - start) - cost.mean.per_chunk
    middle = math.sqrt((len(cost.stages) - 1) * bare / max(cost.mean.per_chunk, 1e-9))
    limit = -(-(tokens - start) // BLOCK)
    low, high = (min(max(fewest, round(middle * factor)), limit) for factor in (0.5, 2.0))
    tried = {round(low + (high - low) * n / (_TRIES - 1)) for n in range(_TRIES)}
    return sorted(tried)


def _shortest(
    start: int, tokens: int, count: int, largest: int, growth: float, cost: ChunkCost
) -> tuple[int, ...]:
    """Cut into at most `count` chunks in the shortest time."""
    first = max(1.0, growth ** (1 - count))  # the one that may take least takes 1
    together = sum(first * growth**n for n in range(count))
    low = (cost.of(start, tokens - start) + (count - 1) * cost.mean.per_chunk) / together  # if cut anywhere
    step, best = cost.of(max(start, tokens - BLOCK), BLOCK) - cost.mean.per_chunk, None
    enough = max(cost.of(max(start, tokens - largest), largest), cost.of(start, min(largest, tokens - start)))
    while best is None and low < enough:
        high = low + step
        best = _packed(start, tokens, count, largest, high * first, growth=growth, cost=cost)
        if best is None:
            low, step = high, 2 * step
    if best is None:
        return even_chunks(start, tokens, largest)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        sizes = _packed(start, tokens, count, largest, middle * first, growth=growth, cost=cost)
        if sizes is None:
            low = middle
        else:
            best, high = sizes, middle
    return best


def _packed(
    start: int, tokens: int, count: int, largest: int, limit: float, *, growth: float, cost: ChunkCost
) -> tuple[int, ...] | None:
    """Fill chunks up to a cost of `limit`, which grows by `growth` from chunk to chunk; None if `count` are
    too few."""
    sizes: list[int] = []
    while start < tokens:
        left = tokens - start
        size = min(cost.fitting(start, limit), largest)
        if size < left <= largest and cost.of(start, left) <= limit:
            size = left  # the last one need not be whole blocks
        size = min(size, left)
        if size == 0 or len(sizes) == count:
            return None
        sizes.append(size)
        start += size
        limit *= growth
    return tuple(sizes)
