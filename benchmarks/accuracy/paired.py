"""Statistics of two methods on the same questions and documents. Pure functions."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Changes:
    """Indices of the questions that only the baseline (lost) or only the method (won) answers exactly."""

    lost: tuple[int, ...]
    won: tuple[int, ...]


def changes(baseline: Sequence[bool], method: Sequence[bool]) -> Changes:
    pairs = list(enumerate(zip(baseline, method, strict=True)))
    return Changes(
        tuple(i for i, (before, after) in pairs if before and not after),
        tuple(i for i, (before, after) in pairs if after and not before),
    )


def sign_test(lost: int, won: int) -> float:
    """The exact two-sided p-value that as uneven a split, or a more uneven one, is chance: McNemar's exact
    test on the questions that changed."""
    changed = lost + won
    tail = sum(math.comb(changed, k) for k in range(min(lost, won) + 1))
    return min(1.0, float(2 * tail / 2**changed))  # of integers: a float ends at 2^1023


def bootstrap_ratio(
    documents: Sequence[tuple[float, float]], *, draws: int = 10_000
) -> tuple[float, float] | None:
    """The interval in which 95% of sum(method) / sum(baseline) lie, over whole documents drawn with
    replacement. Questions of one document are not independent, so none is drawn by itself.

    documents: (exact of the method, exact of the baseline); for a mean over questions (sum of its values, how
    many). None where there is nothing to draw from: less than two documents. Draws whose second sum is 0 are
    left out; None if all are.
    """
    if len(documents) < 2:
        return None
    rng, ratios = random.Random(0), []
    for _ in range(draws):
        drawn = rng.choices(documents, k=len(documents))
        baseline = sum(b for _, b in drawn)
        if baseline:
            ratios.append(sum(a for a, _ in drawn) / baseline)
    if not ratios:
        return None
    ratios.sort()
    return quantile(ratios, 0.025), quantile(ratios, 0.975)


def quantile(ascending: Sequence[float], share: float) -> float:
    """Linear between the two nearest, as numpy's default."""
    place = share * (len(ascending) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (place - low) * (ascending[high] - ascending[low])


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; no error of a single value. Raises ValueError for none."""
    if not values:
        raise ValueError("the mean of nothing")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))
