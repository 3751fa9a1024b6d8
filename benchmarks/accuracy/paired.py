"""Paired statistics of two methods on the same questions and documents. Pure functions."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Changes:
    """Indices of questions that only the baseline (lost) or only the method (won) answers exactly."""

    lost: tuple[int, ...]
    won: tuple[int, ...]


def changes(baseline: Sequence[bool], method: Sequence[bool]) -> Changes:
    pairs = list(enumerate(zip(baseline, method, strict=True)))
    return Changes(
        tuple(i for i, (before, after) in pairs if before and not after),
        tuple(i for i, (before, after) in pairs if after and not before),
    )


def sign_test(lost: int, won: int) -> float:
    """Return the two-sided p-value of McNemar's exact test on the questions that changed: the probability
    that chance splits them this unevenly or more."""
    changed = lost + won
    tail = sum(math.comb(changed, k) for k in range(min(lost, won) + 1))
    return min(1.0, float(2 * tail / 2**changed))  # a ratio of integers, because floats end at 2^1023


def bootstrap_ratio(
    documents: Sequence[tuple[float, float]], *, draws: int = 10_000
) -> tuple[float, float] | None:
    """Return the 95% bootstrap interval of sum(method) / sum(baseline). Whole documents are drawn, because
    questions of one document are not independent.

    documents: For each document the method's and the baseline's number of exact answers. For a mean over
    questions: the sum of values and the number of questions.

    Draws whose second sum is 0 are ignored. The result is None if all are, or for fewer than two documents.
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
    """Return a quantile, interpolated linearly like numpy's default."""
    place = share * (len(ascending) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (place - low) * (ascending[high] - ascending[low])


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error (None for one value). Raises ValueError without values."""
    if not values:
        raise ValueError("the mean of nothing")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))
