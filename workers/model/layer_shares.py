"""Splits a model's layers over the stages of a pipeline.

A layer has two halves, attention and MLP. A stage computes consecutive halves and may begin or end inside a
layer, since the hidden state has the same width between halves as between layers.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise

_CACHE_SIZE = 512


@dataclass(frozen=True)
class LayerShare:
    """A stage's share of the model: the attention of `layers` and the MLPs of `mlps`.

    Start and end of `mlps` equal those of `layers`, or are smaller by one.
    """

    layers: range
    mlps: range


@lru_cache(_CACHE_SIZE)
def balanced(costs: tuple[int, ...], stages: int) -> tuple[LayerShare, ...]:
    """Split the halves so that the most expensive share is as cheap as possible. Each share has at least one
    attention. Ties go to the split with the fewest cuts inside layers, then to the most even split.

    Args:
        costs: The costs of all halves: attention, MLP, attention, …
    """
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


def _fit(before: tuple[int, ...], stages: int, limit: int) -> bool:
    """Return whether `stages` shares of cost at most `limit` cover all halves. before[n] is the cost of the
    first n halves."""
    at = 0
    for later in reversed(range(stages)):
        end = _furthest(before, at, later, limit)
        if end <= at + at % 2:
            return False
        at = end
    return at == len(before) - 1


def _furthest(before: tuple[int, ...], at: int, later: int, limit: int) -> int:
    return min(bisect_right(before, before[at] + limit) - 1, len(before) - 1 - 2 * later)


def _cuts(before: tuple[int, ...], stages: int, limit: int) -> tuple[int, ...]:
    @cache
    def best(at: int, later: int) -> tuple[int, int, tuple[int, ...]] | None:
        """Return the best cuts of the halves from `at` on: the number of cuts inside layers, the sum of the
        shares' squared costs, and the cuts."""
        left = before[-1] - before[at]
        if later == 0:
            return (0, left**2, ()) if left <= limit else None
        candidates = []
        for end in range(_furthest(before, at, later, limit), at + at % 2, -1):
            if before[-1] - before[end] > later * limit:
                break
            if (rest := best(end, later - 1)) is not None:
                inside, squares, cuts = rest
                candidates.append((inside + end % 2, squares + (before[end] - before[at]) ** 2, (end, *cuts)))
        return min(candidates, default=None)

    plan = best(0, stages - 1)
    if plan is None:
        raise AssertionError(f"no {stages} shares of {limit}")
    return plan[2]
