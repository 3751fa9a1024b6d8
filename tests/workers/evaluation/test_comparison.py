"""Scores of settings beside dense attention, and their intervals."""

from __future__ import annotations

import math
import random

import pytest

from deltafront.workers.evaluation.comparison import (
    MeasuredAnswer,
    compare,
    kept_interval,
    markdown,
    t_quantile,
)
from deltafront.workers.evaluation.prompts import TaskPrompt


def answer(said: str, *, logp: float = 0.0, agreement: float = 1.0, density: float = 0.2) -> MeasuredAnswer:
    return MeasuredAnswer((1,), said, density, 1.0, logp, agreement)


def test_comparison_counts_answers_that_score_lower_or_higher() -> None:
    prompts = [TaskPrompt(task, str(n), "", "?", ("a", "b")) for n, task in enumerate("uuvv")]
    dense = [answer(said, density=1.0, logp=-0.5) for said in ("a b", "a b", "a", "")]
    row = compare("dpxa@8", prompts, [answer(said, logp=-1.0) for said in ("a b", "", "a b", "b")], dense)
    assert (row.lost, row.won, row.samples) == (1, 2, 4)
    assert (row.dense, row.score, row.kept) == (0.625, 0.625, 1.0)
    assert row.by_task == {"u": 0.5, "v": 0.75} and row.same == 0.25
    assert (row.density, row.logp) == (0.2, -0.5)
    assert "| dpxa@8 | 0.200 | 1.00 s | 0.625 | 0.625 |" in markdown([row])
    assert "1 / 2 of 4" in markdown([row])


def test_agreement_with_dense_is_the_score_without_right_answers() -> None:
    prompts = [TaskPrompt("continuation", str(n), "text", "") for n in range(4)]
    row = compare("x", prompts, [answer("", agreement=0.5)] * 4, [answer("")] * 4)
    assert (row.dense, row.score, row.lost, row.won) == (1.0, 0.5, 4, 0)


def test_a_setting_is_compared_on_the_prompts_that_it_answered() -> None:
    prompts = [TaskPrompt("t", str(n), "", "?", ("a",)) for n in range(5)]
    row = compare("x", prompts, [answer("a")] * 2, [answer("a"), answer(""), *[answer("a")] * 3])
    assert (row.samples, row.won, row.lost) == (2, 1, 0)


def test_intervals_follow_students_t_and_cover_the_true_share() -> None:
    for degrees, expected in ((10, 2.2281), (30, 2.0423), (179, 1.9733)):  # tables of t, 0.975
        assert t_quantile(0.975, degrees) == pytest.approx(expected, abs=0.003)
    rng, inside, sources = random.Random(0), 0, [str(n) for n in range(60)]
    for _ in range(400):
        dense = [float(rng.random() < 0.8) for _ in sources]
        scores = [d if rng.random() < 0.9 else float(rng.random() < 0.5) for d in dense]
        low, high = kept_interval(scores, dense, sources) or (math.nan, math.nan)
        inside += low <= (0.8 * 0.95 + 0.2 * 0.05) / 0.8 <= high
    assert inside / 400 > 0.9
    assert kept_interval([1.0], [1.0], ["a"]) is None


def test_confidence_interval_counts_documents_not_questions() -> None:
    scores = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    apart = kept_interval(scores, [1.0] * 6, list("abcdef"))
    once = kept_interval(scores[:3] + [1.0] * 3, [1.0] * 6, list("aabbcc"))
    assert apart is not None and once is not None
    whole = [sum(scores[:2]), 2.0, 2.0]  # documents of two questions
    errors = [each - 5 / 6 * 2 for each in whole]
    spread = math.sqrt(sum(error**2 for error in errors) / 2) * math.sqrt(3) / 6
    assert once[1] - 5 / 6 == pytest.approx(t_quantile(0.975, 2) * spread)


def test_interval_is_wide_if_few_documents_lose_nothing() -> None:
    """The rule of three: with nothing lost in n documents, 3 in n may be lost."""
    for documents in (10, 100):
        names = [str(n) for n in range(documents)]
        assert kept_interval([1.0] * documents, [1.0] * documents, names) == (1 - 3 / documents, 1.0)
