"""How a model's layers are shared out among the stages of a pipeline. Pure.

A layer has two halves: its attention, which makes K and V, and its feed-forward network. In order they are
A0 M0 A1 M1 …, and a stage computes some that follow one another. What it passes on is the residual stream,
which is as wide between the halves of a layer as it is between layers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise

_REMEMBERED = 512


@dataclass(frozen=True)
class LayerShare:
    """What one stage computes: the attention of `layers`, whose K and V it holds, and the feed-forward
    networks of `feeds`. Each end of `feeds` is that of `layers` or one less."""

    layers: range
    mlps: range


@lru_cache(_REMEMBERED)
def balanced(costs: tuple[int, ...], stages: int) -> tuple[LayerShare, ...]:
    """Share out halves of these costs (attention, feed-forward network, attention, …) so that the dearest
    share is as cheap as can be, with an attention in each; of several such ways one that cuts the fewest
    layers in two, and of these the most even. There must be a layer for each stage at least."""
    before = (0, *accumulate(costs))
    low, high = max(costs), before[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fit(before, stages, middle) else (middle + 1, high)
    cuts = (0, *_cuts(before, stages, low), len(costs))
    return tuple(
        LayerShare(range((start + 1) // 2, (end + 1) // 2), range(start // 2, end // 2))
        for start, end in pairwise(cuts)
    )


def _fit(before: tuple[int, ...], stages: int, most: int) -> bool:
    """Whether shares of `most` each are enough. before: what the halves before each one cost together."""
    at = 0
    for later in reversed(range(stages)):
        end = _furthest(before, at, later, most)
        if end <= at + at % 2:
            return False
        at = end
    return at == len(before) - 1


def _furthest(before: tuple[int, ...], at: int, later: int, most: int) -> int:
    """Where a share of `most` that begins at `at` ends at the latest; each later stage has a layer left."""
    return min(bisect_right(before, before[at] + most) - 1, len(before) - 1 - 2 * later)


def _cuts(before: tuple[int, ...], stages: int, most: int) -> tuple[int, ...]:
    """Where to cut, in halves, for shares of `most` at most each, which are enough."""

    @cache
    def best(at: int, later: int) -> tuple[int, int, tuple[int, ...]] | None:
        """How many cuts behind `at` are within a layer, the sum of the shares' squares, and the cuts."""
        left = before[-1] - before[at]
        if later == 0:
            return (0, left**2, ()) if left <= most else None
        found = []
        for end in range(_furthest(before, at, later, most), at + at % 2, -1):
            if before[-1] - before[end] > later * most:
                break
            if (rest := best(end, later - 1)) is not None:
                inside, squares, cuts = rest
                found.append((inside + end % 2, squares + (before[end] - before[at]) ** 2, (end, *cuts)))
        return min(found, default=None)

    found = best(0, stages - 1)
    if found is None:
        raise AssertionError(f"no {stages} shares of {most}")
    return found[2]
