"""Tests XAttention's threshold search against all possible adjustments."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafront.workers.calibration import thresholds
from deltafront.workers.calibration.curves import QUOTAS, Curves
from deltafront.workers.calibration.method_levels import head_thresholds
from deltafront.workers.calibration.sensitivity import LayerCosts
from deltafront.workers.calibration.thresholds import FACTOR, START, adjusted_quotas, between

QUOTA_J = START * FACTOR ** torch.arange(4, dtype=torch.float64)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.integers(0, 999), st.floats(0.1, 1.0))
def test_threshold_search_makes_the_fewest_cheapest_adjustments(
    heads: int, seed: int, density: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    density_HI = torch.rand(heads, 5, generator=draw).sort(1).values
    loss_HI = torch.rand(heads, 5, generator=draw)
    quotas = (0.0, 0.6, 0.7, 0.85, 1.0)
    density_HJ, loss_HJ = (between(value, quotas, QUOTA_J) for value in (density_HI, loss_HI))
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {}
    for steps in itertools.product(range(4), repeat=heads):
        loss = sum(float(loss_HJ[head, step]) for head, step in enumerate(steps))
        spent = sum(float(density_HJ[head, step]) for head, step in enumerate(steps))
        best[sum(steps)] = min(best.get(sum(steps), (float("inf"), 0.0, ())), (loss, spent, steps))
    meeting = [count for count in sorted(best) if best[count][1] <= density * heads + 1e-9]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(thresholds, "ADJUSTMENTS", 3)
        if not meeting:
            with pytest.raises(ValueError, match="cannot be had: the least thresholds take"):
                adjusted_quotas(density_HI, loss_HI, quotas, density)
            return
        found = adjusted_quotas(density_HI, loss_HI, quotas, density)
    assert found == [round(float(QUOTA_J[step]), 6) for step in best[meeting[0]][2]]


def test_interpolates_linearly_between_calibrated_thresholds() -> None:
    value_HI = torch.tensor([[0.0, 4.0, 5.0], [1.0, 1.0, 0.0]])
    at = between(value_HI, (0.0, 0.5, 1.0), torch.tensor([0.0, 0.125, 0.5, 0.9, 1.0], dtype=torch.float64))
    expected = torch.tensor([[0.0, 1.0, 4.0, 4.8, 5.0], [1.0, 1.0, 1.0, 0.2, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(at, expected)


def test_threshold_search_adjusts_mostly_low_cost_layers() -> None:
    steps = torch.linspace(0, 1, len(QUOTAS))
    density = (0.2 + 0.8 * steps).expand(2, 2, -1)
    error = ((1 - steps) ** 2).expand(2, 2, -1)
    costs = LayerCosts(torch.tensor([9.0, 1.0]), torch.zeros(2))
    one, other = head_thresholds([Curves(density, error, error, QUOTAS)], [costs], 0.6, "threshold")
    assert min(one) >= max(other) and min(one) > min(other)


def test_only_marginal_gain_gives_fewer_tiles_to_a_head_needing_more() -> None:
    """The two heads have the same errors, but one needs more tiles. Only allocation by marginal gain gives
    that head fewer tiles, with a smaller total error at the same density."""
    step = torch.tensor(QUOTAS)
    density = torch.stack([0.1 + 0.9 * step, 0.1 + 0.1 * step])[None]
    error = ((1 - step) ** 2).expand(1, 2, -1)
    curves, turned = Curves(density, error, error, QUOTAS), Curves(density.flip(1), error, error, QUOTAS)
    costs = [LayerCosts(torch.ones(1), torch.zeros(1))]
    ((dear, cheap),) = head_thresholds([curves], costs, 0.25)
    assert head_thresholds([turned], costs, 0.25) == ((cheap, dear),) and dear < cheap
    ((first, second),) = head_thresholds([turned], costs, 0.25, "threshold")
    assert (1 - dear) ** 2 + (1 - cheap) ** 2 < (1 - first) ** 2 + (1 - second) ** 2
