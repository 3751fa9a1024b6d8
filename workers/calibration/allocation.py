"""Allocates a mean density over heads, by marginal gain on each head's error curve (`curves.py`)."""

import heapq
from collections.abc import Sequence
from itertools import pairwise

_ROUNDING = 1e-9
Point = tuple[float, float, float]
"""(density, error, quota): a head's density and output error if its kept tiles reach the share `quota` of
attention scores (top-p)."""


def allocate(curves: Sequence[Sequence[Point]], density: float) -> list[float]:
    """Return each head's quota, with a mean density of at most `density` and a small sum of errors.

    A greedy search takes the best step along any head's lower convex hull. Raises ValueError if even the
    lowest density of every head exceeds `density`.
    """
    hulls = [lower_hull(points) for points in curves]
    left = density * len(hulls) - sum(hull[0][0] for hull in hulls)
    if left < 0:
        least = density - left / len(hulls)
        raise ValueError(
            f"a mean density of {density:g} cannot be had: sink and window alone take {least:.4f}"
        )
    places = [0] * len(hulls)
    steps = [
        (-_gain(a, b), head, place, b[0] - a[0])
        for head, hull in enumerate(hulls)
        for place, (a, b) in enumerate(pairwise(hull))
    ]
    heapq.heapify(steps)
    stuck = set[int]()
    while steps:
        _, head, place, cost = heapq.heappop(steps)
        if head in stuck or cost > left + _ROUNDING:
            stuck.add(head)
            continue
        left -= cost
        places[head] = place + 1
    return [hull[place][2] for hull, place in zip(hulls, places, strict=True)]


def lower_hull(points: Sequence[Point]) -> list[Point]:
    """Return the corners of the points' lower convex hull, from the lowest density to the lowest error."""
    hull: list[Point] = []
    for point in sorted(points):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], point):
            hull.pop()
        if hull and point[0] == hull[-1][0]:
            hull.pop()
        hull.append(point)
    return hull


def _gain(a: Point, b: Point) -> float:
    return (a[1] - b[1]) / (b[0] - a[0]) if b[0] > a[0] else float("inf")
