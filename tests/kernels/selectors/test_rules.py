"""Tests selection rules: CPU version against oracle, kernel against CPU version, ties and edge cases."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.selectors.rules import cpu, kernel
from deltafront.kernels.selectors.rules.rule import Kind, Rule
from deltafront.tests.numerics import poisoned_empty, tiles
from deltafront.tests.reference.selection import kept_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS: list[Kind] = ["cumulative", "top_k"]
FORCED = [(1, 1, False), (2, 4, False), (1, 1, True), (2, 5, True)]
"""(sink blocks, window blocks, `outside`)."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sink", "window", "outside"), FORCED)
def test_rules_on_the_cpu_equal_the_oracle(kind: Kind, sink: int, window: int, outside: bool) -> None:
    score = torch.rand(2, 4, 5, 24) ** 6
    score[0, 1] = (score[0, 1] * 8).round() / 8  # ties, and rows with zeros
    score[1, 2, 3, 2:18] = 0.0  # all mass in sink and window
    thresholds = torch.tensor([0.31, 0.55, 0.83, 1.0])
    mask = cpu.select(score, Rule(kind, thresholds, sink, window, outside), 19)
    how = {"sink": sink, "window": window, "outside": outside}
    expected = [
        kept_tiles(score[b, h, n].tolist(), 19 + n, kind, float(thresholds[h]), **how)
        for b in range(2)
        for h in range(4)
        for n in range(5)
    ]
    assert tiles(mask) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "first"), [(5, 0), (3, 30), (1, 40)])
@pytest.mark.parametrize(("sink", "window", "outside"), FORCED[::3])
def test_rule_kernel_equals_the_cpu_version(
    kind: Kind, rows: int, first: int, sink: int, window: int, outside: bool
) -> None:
    score = torch.rand(2, 3, rows, first + rows, device=DEVICE) ** 6
    score[1, 1] = (score[1, 1] * 4).round() / 4
    score[0, 2, 0] = 0.0
    score[0, 1, 0, 1:] = 0.0  # all mass in the sink
    rule = Rule(kind, torch.tensor([0.4, 0.9, 1.0]), sink, window, outside)
    with poisoned_empty():
        mask = kernel.select(score, rule, first, with_scores=True)
    expected = cpu.select(score, rule, first, with_scores=True)
    assert tiles(mask) == tiles(expected)
    assert mask.score_BHNM is not None and expected.score_BHNM is not None
    listed = torch.arange(first + rows, device=DEVICE) < mask.count_BHN[..., None]
    assert torch.equal(mask.score_BHNM[listed], expected.score_BHNM[listed])


@pytest.mark.parametrize("select", [cpu.select, kernel.select])
def test_selection_rules_always_keep_sink_diagonal_and_ties(select: object) -> None:
    assert callable(select)
    score = torch.zeros(1, 1, 1, 9, device=DEVICE)
    score[..., 4] = 1.0
    assert tiles(select(score, Rule("cumulative", 0.5), 8)) == [[0, 4, 8]]
    assert tiles(select(score, Rule("cumulative", 1.0), 8)) == [list(range(9))]
    assert tiles(select(score, Rule("cumulative", 0.0), 8)) == [[0, 8]]
    assert tiles(select(torch.zeros_like(score), Rule("cumulative", 0.5), 8)) == [list(range(9))]
    tied = torch.ones(1, 1, 1, 9, device=DEVICE)
    assert tiles(select(tied, Rule("cumulative", 0.5), 8)) == [list(range(9))]
    assert tiles(select(score[..., :1], Rule("cumulative", 0.5), 0)) == [[0]]
    everything = [[*range(9)]]
    for kind, whole in (("cumulative", 1.0), ("top_k", 1.0)):
        assert tiles(select(score, Rule(kind, whole, outside=True), 8)) == everything, "full budget is dense"


@pytest.mark.parametrize("select", [cpu.select, kernel.select])
def test_tau_can_exclude_the_mass_of_sink_and_window(select: object) -> None:
    assert callable(select)
    score = torch.tensor([95.0, 0, 0, 0.6, 0, 0, 0.3, 2.1, 2.0], device=DEVICE).view(1, 1, 1, 9)
    assert tiles(select(score, Rule("cumulative", 0.95), 8)) == [[0, 8]]
    assert tiles(select(score, Rule("cumulative", 0.6, outside=True), 8)) == [[0, 7, 8]]
    assert tiles(select(score, Rule("cumulative", 0.6, 1, 2, outside=True), 8)) == [[0, 3, 7, 8]]


@pytest.mark.parametrize("select", [cpu.select, kernel.select])
@pytest.mark.parametrize("tiny", [1e-18, 1e-20, 1e-34, 1e-36])
def test_tau_without_the_sink_works_for_tiny_scores(select: object, tiny: float) -> None:
    """If a sink's logit is 80 above the others, their scores are about 1e-35."""
    assert callable(select)
    outside = [0.3, 0.1, 0.9, 0.2, 0.8, 0.05, 0.6]
    score = torch.tensor([1.0, *(tiny * part for part in outside), 0.5], device=DEVICE).view(1, 1, 1, 9)
    for threshold, expected in ((0.5, [0, 3, 5, 8]), (0.85, [0, 1, 3, 5, 7, 8])):
        assert tiles(select(score, Rule("cumulative", threshold, outside=True), 8)) == [expected]
    assert tiles(select(score, Rule("cumulative", 0.0, outside=True), 8)) == [[0, 8]]


@pytest.mark.parametrize("select", [cpu.select, kernel.select])
@pytest.mark.parametrize("count", [10, 25, 90, 100])
def test_the_number_of_kept_tiles_is_rounded_up(select: object, count: int) -> None:
    """In float32, 0.6 of 25 tiles is more than 15. In float64, 0.28 of 25 is more than 7."""
    assert callable(select)
    shares = ["0.07", "0.15", "0.28", "0.3", "0.55", "0.6"]
    score = torch.linspace(1.0, 0.1, count, device=DEVICE)
    score[-1] = 2.0  # the diagonal, which is always kept
    rule = Rule("top_k", torch.tensor([float(share) for share in shares]))
    mask = select(score.expand(1, len(shares), 1, count), rule, count - 1)
    expected = [max(2, math.ceil(Fraction(share) * count)) for share in shares]
    assert mask.count_BHN[0, :, 0].tolist() == expected


@pytest.mark.parametrize("select", [cpu.select, kernel.select])
def test_selection_ignores_scores_after_the_diagonal(select: object) -> None:
    assert callable(select)
    score = torch.rand(1, 2, 6, 6, device=DEVICE)
    clean = tiles(select(score, Rule("cumulative", 0.7), 0))
    score += torch.triu(torch.full_like(score, 1e6), diagonal=1)
    assert tiles(select(score, Rule("cumulative", 0.7), 0)) == clean


@pytest.mark.parametrize("select", [cpu.select, kernel.select])
def test_selection_refuses_bad_scores_and_positions(select: object) -> None:
    assert callable(select)
    rule = Rule("cumulative", 0.5)
    good = torch.ones(1, 2, 3, 5, device=DEVICE)
    for score, first in (
        (good[0], 2),
        (good.double(), 2),
        (good, 1),
        (good[..., :0], -3),
        (torch.empty(1, 1, 1, 20_000, device=DEVICE), 19_999),
    ):
        with pytest.raises(KernelInputError):
            select(score, rule, first)
    with pytest.raises(KernelInputError, match="3 thresholds for 2"):
        select(good, Rule("cumulative", torch.ones(3)), 2)


def test_refuses_selection_rules_with_bad_kinds_or_thresholds() -> None:
    for kind, threshold in (("best", 0.5), ("cumulative", 1.5), ("top_k", -0.1), ("top_k", float("nan"))):
        with pytest.raises(KernelInputError):
            Rule(kind, threshold)  # type: ignore[arg-type]
    for sink, window in ((0, 1), (1, 0)):
        with pytest.raises(KernelInputError, match="at least one block"):
            Rule("cumulative", 0.5, sink, window)
    with pytest.raises(KernelInputError):
        Rule("cumulative", torch.ones(2, 2))
    with pytest.raises(KernelInputError):
        Rule("cumulative", torch.ones(2, dtype=torch.int64))
