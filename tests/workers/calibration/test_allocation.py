"""Tests the allocation of thresholds to heads against all possible allocations."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafront.workers.calibration.allocation import Point, allocate, lower_hull

STEP = st.integers(1, 20)


@st.composite
def a_curve(draw: st.DrawFn) -> list[Point]:
    """Draw a strictly convex curve: steps have the same cost and decreasing gains."""
    gains = sorted(draw(st.lists(st.integers(1, 500), min_size=1, max_size=4, unique=True)), reverse=True)
    density, error = draw(STEP) / 100, sum(gains) / 100
    points = [(density, error, 0.0)]
    for i, gain in enumerate(gains):
        density, error = density + 0.1, error - gain / 100
        points.append((density, error, (i + 1) / 10))
    return points


@settings(max_examples=150, deadline=None)
@given(st.lists(a_curve(), min_size=1, max_size=4), st.floats(0.2, 1.0))
def test_greedy_allocation_of_equal_steps_is_optimal(curves: list[list[Point]], density: float) -> None:
    chosen = allocate(curves, density)
    spent, error = _totals(curves, chosen)
    assert spent <= density * len(curves) + 1e-8
    best = min(
        sum(point[1] for point in points)
        for points in itertools.product(*curves)
        if sum(point[0] for point in points) <= density * len(curves) + 1e-9
    )
    assert error == pytest.approx(best, abs=1e-6)


def _totals(curves: list[list[Point]], chosen: list[float]) -> tuple[float, float]:
    points = [
        next(point for point in points if point[2] == quota)
        for points, quota in zip(curves, chosen, strict=True)
    ]
    return sum(point[0] for point in points), sum(point[1] for point in points)


def test_allocation_considers_only_the_lower_convex_hull() -> None:
    points = [(0.1, 1.0, 0.0), (0.2, 0.9, 0.1), (0.3, 0.4, 0.2), (0.5, 0.5, 0.3), (0.9, 0.0, 0.4)]
    assert lower_hull(points) == [(0.1, 1.0, 0.0), (0.3, 0.4, 0.2), (0.9, 0.0, 0.4)]


def test_refuses_a_density_below_that_of_sink_and_window() -> None:
    with pytest.raises(ValueError, match=r"density of 0\.05 .* alone take 0\.1500"):
        allocate([[(0.1, 1.0, 0.0)], [(0.2, 1.0, 0.0)]], 0.05)
