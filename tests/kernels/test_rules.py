"""The selection rules: reference against brute force, kernel against reference, ties and edges."""

from __future__ import annotations

import math

import pytest
import torch

from deltafront.kernels.interface import KernelInputError, TileMask
from deltafront.kernels.selectors.rules import kernel, reference
from deltafront.kernels.selectors.rules.rule import LEVELS, Kind, Rule
from deltafront.kernels.testing import poisoned_empty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS: list[Kind] = ["cumulative", "max_relative", "top_k"]


def lists(mask: TileMask) -> list[list[int]]:
    columns = mask.index_BHNM.shape[-1]
    index, count = mask.index_BHNM.reshape(-1, columns), mask.count_BHN.reshape(-1)
    return [index[row, : int(count[row])].tolist() for row in range(count.shape[0])]


def brute_force(score: list[float], diagonal: int, kind: str, amount: float) -> list[int]:
    """One row: try every threshold from the highest down."""
    score = score[: diagonal + 1]
    forced = {0, diagonal}
    top = max(score)
    if top <= 0:
        return list(range(diagonal + 1))
    if kind == "max_relative":
        limit = torch.tensor(amount) * torch.tensor(top)
        return sorted(forced | {m for m, s in enumerate(score) if s >= limit})
    value = [math.floor(s * (LEVELS / top) + 0.5) if kind == "cumulative" else s for s in score]
    weight = value if kind == "cumulative" else [1.0] * len(score)
    need = amount * sum(value) if kind == "cumulative" else math.ceil(amount * len(score) - 1e-6)
    if kind == "cumulative" and amount >= 1:
        return list(range(diagonal + 1))
    for limit in (math.inf, *sorted(set(value), reverse=True)):
        kept = forced | {m for m, v in enumerate(value) if v >= limit}
        if sum(weight[m] for m in kept) >= need:
            return sorted(kept)
    raise AssertionError("the whole row is always enough")


@pytest.mark.parametrize("kind", KINDS)
def test_reference_equals_brute_force(kind: Kind) -> None:
    score = torch.rand(2, 4, 5, 24) ** 6
    score[0, 1] = (score[0, 1] * 8).round() / 8  # ties, and rows with zeros
    amounts = torch.tensor([0.31, 0.55, 0.83, 1.0])
    mask = reference.select(score, Rule(kind, amounts), 19)
    expected = [
        brute_force(score[b, h, n].tolist(), 19 + n, kind, float(amounts[h]))
        for b in range(2)
        for h in range(4)
        for n in range(5)
    ]
    assert lists(mask) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "first"), [(5, 0), (3, 30), (1, 40)])
def test_kernel_equals_reference(kind: Kind, rows: int, first: int) -> None:
    score = torch.rand(2, 3, rows, first + rows, device=DEVICE) ** 6
    score[1, 1] = (score[1, 1] * 4).round() / 4
    score[0, 2, 0] = 0.0
    rule = Rule(kind, torch.tensor([0.4, 0.9, 1.0]))
    with poisoned_empty():
        mask = kernel.select(score, rule, first, with_scores=True)
    expected = reference.select(score, rule, first, with_scores=True)
    assert lists(mask) == lists(expected)
    assert mask.score_BHNM is not None and expected.score_BHNM is not None
    listed = torch.arange(first + rows, device=DEVICE) < mask.count_BHN[..., None]
    assert torch.equal(mask.score_BHNM[listed], expected.score_BHNM[listed])


@pytest.mark.parametrize("select", [reference.select, kernel.select])
def test_forced_tiles_ties_and_edges(select: object) -> None:
    assert callable(select)
    score = torch.zeros(1, 1, 1, 9, device=DEVICE)
    score[..., 4] = 1.0
    assert lists(select(score, Rule("max_relative", 1.0), 8)) == [[0, 4, 8]]
    assert lists(select(score, Rule("cumulative", 0.5), 8)) == [[0, 4, 8]]
    assert lists(select(score, Rule("cumulative", 1.0), 8)) == [list(range(9))]
    assert lists(select(score, Rule("cumulative", 0.0), 8)) == [[0, 8]]
    assert lists(select(torch.zeros_like(score), Rule("cumulative", 0.5), 8)) == [list(range(9))]
    tied = torch.ones(1, 1, 1, 9, device=DEVICE)
    assert lists(select(tied, Rule("cumulative", 0.5), 8)) == [list(range(9))]
    assert lists(select(score[..., :1], Rule("cumulative", 0.5), 0)) == [[0]]


@pytest.mark.parametrize("select", [reference.select, kernel.select])
def test_scores_after_the_diagonal_are_ignored(select: object) -> None:
    assert callable(select)
    score = torch.rand(1, 2, 6, 6, device=DEVICE)
    clean = lists(select(score, Rule("cumulative", 0.7), 0))
    score += torch.triu(torch.full_like(score, 1e6), diagonal=1)
    assert lists(select(score, Rule("cumulative", 0.7), 0)) == clean


@pytest.mark.parametrize("select", [reference.select, kernel.select])
def test_bad_input(select: object) -> None:
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
    with pytest.raises(KernelInputError, match="3 amounts for 2"):
        select(good, Rule("cumulative", torch.ones(3)), 2)


def test_bad_rules() -> None:
    for kind, amount in (("best", 0.5), ("cumulative", 1.5), ("top_k", -0.1), ("top_k", float("nan"))):
        with pytest.raises(KernelInputError):
            Rule(kind, amount)  # type: ignore[arg-type]
    with pytest.raises(KernelInputError):
        Rule("cumulative", torch.ones(2, 2))
    with pytest.raises(KernelInputError):
        Rule("cumulative", torch.ones(2, dtype=torch.int64))
