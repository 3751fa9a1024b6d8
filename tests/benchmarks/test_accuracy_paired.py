"""Tests statistics, rows and gates of the accuracy benchmark."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from deltafront.benchmarks.accuracy.paired import (
    bootstrap_ratio,
    changes,
    mean_and_error,
    quantile,
    sign_test,
)
from deltafront.benchmarks.accuracy.report import (
    Outcome,
    apart,
    judged,
    missed,
    parse_gate,
    rows,
    table,
    together,
    together_table,
)


def test_changes_are_questions_that_only_one_method_answers() -> None:
    found = changes([True, True, False, False, True], [True, False, True, False, False])
    assert (found.lost, found.won) == ((1, 4), (2,))


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (1, 0), (5, 0), (3, 3), (7, 2), (2, 9)])
def test_sign_test_equals_counting_all_outcomes(lost: int, won: int) -> None:
    changed = lost + won
    heads = [sum(flips) for flips in itertools.product((0, 1), repeat=changed)]
    uneven = abs(2 * lost - changed)
    expected = sum(abs(2 * n - changed) >= uneven for n in heads) / len(heads)
    assert sign_test(lost, won) == pytest.approx(expected)


def test_sign_test_does_not_underflow_with_thousands_of_questions() -> None:
    assert sign_test(1500, 1500) == 1.0
    assert sign_test(1024, 0) == sign_test(0, 1024) == 2.0**-1023
    assert sign_test(900, 1100) == pytest.approx(math.erfc(199 / math.sqrt(2 * 2000)), rel=0.02)


def test_bootstrap_interval_is_close_to_that_of_all_possible_draws() -> None:
    documents = [(9, 10), (4, 10), (12, 11), (8, 8)]
    ratios = sorted(
        sum(a for a, _ in drawn) / sum(b for _, b in drawn)
        for drawn in itertools.product(documents, repeat=4)
    )
    found = bootstrap_ratio(documents, draws=40_000)
    assert found is not None
    assert found[0] == pytest.approx(quantile(ratios, 0.025), abs=0.02)
    assert found[1] == pytest.approx(quantile(ratios, 0.975), abs=0.02)
    assert found == bootstrap_ratio(documents, draws=40_000)


def test_bootstrap_returns_none_for_a_single_document() -> None:
    assert bootstrap_ratio([(3, 4)]) is None
    assert bootstrap_ratio([(0, 0), (1, 0)]) is None
    assert bootstrap_ratio([(1, 2), (2, 4)]) == (0.5, 0.5)


def test_returns_the_mean_with_its_standard_error() -> None:
    mean, error = mean_and_error([1.0, 2.0, 3.0, 6.0])
    assert mean == 3.0
    assert error == pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 3) / 2)
    assert mean_and_error([4.0]) == (4.0, None)
    with pytest.raises(ValueError, match="nothing"):
        mean_and_error([])


def outcome(case: str, document: str, kl: float, *exacts: bool) -> Outcome:
    answers = {f"key {i}": (-0.5 if exact else -3.5, exact) for i, exact in enumerate(exacts)}
    return Outcome(case, "needles", 4096, document, 0.25, answers, ms=10.0, kl=kl, kl_p95=kl, perplexity=8.0)


OUTCOMES = [
    outcome("dense", "a", 0.0, True, True, True),
    outcome("dpxa:tau=0.5", "a", 0.25, True, False, True),
    replace(outcome("decode 3:16", "a", 0.0, True, False), kl=None, kl_p95=None, ms=None, agree=0.5),
    outcome("dense", "b", 0.0, True, True, False),
    outcome("dpxa:tau=0.5", "b", 0.75, True, True, True),
    replace(outcome("decode 3:16", "b", 0.0, True, True), kl=None, kl_p95=None, ms=None, agree=1.0),
]


def test_rows_compare_each_case_with_dense() -> None:
    dense, dpxa, decode = rows(OUTCOMES, "dense")
    assert (dense["exact"], dense["questions"], dense["kl"], dense["lost"]) == (5, 6, 0.0, [])
    assert (dpxa["exact"], dpxa["exact_dense"], dpxa["questions"]) == (5, 5, 6)
    assert (dpxa["lost"], dpxa["won"], dpxa["p"]) == (["a key 1"], ["b key 2"], 1.0)
    assert (dpxa["kl"], dpxa["kl_error"]) == (0.5, 0.25)
    assert dpxa["logp_difference"] == pytest.approx(0.0)
    assert (decode["exact"], decode["exact_dense"], decode["questions"]) == (3, 4, 4)
    assert decode["agree"] == 0.75
    assert "kl" not in decode and "ms" not in decode
    assert "| 5 of 6 (5) |" in table([dpxa])


def test_bootstraps_over_documents_in_place_of_questions() -> None:
    """In each document all questions have one result. Drawing questions would give a small interval."""
    asked = [f"key {i}" for i in range(50)]
    found = [
        replace(outcome(case, name, 0.0), answers=dict.fromkeys(asked, (logp, True)))
        for name, lost in (("a", 0.0), ("b", 1.0))
        for case, logp in (("dense", -0.5), ("dpxa", -0.5 - lost))
    ]
    _dense, dpxa = rows(found, "dense")
    assert dpxa["logp_difference"] == -0.5 and dpxa["logp_95"] == [-1.0, 0.0]
    drawn = [(one["exact"], one["exact_dense"]) for one in dpxa["by_document"]]
    assert tuple(dpxa["ratio_95"]) == bootstrap_ratio(drawn) == (1.0, 1.0)
    assert [one["document"] for one in dpxa["by_document"]] == ["a", "b"]


def test_key_token_loss_weighs_documents_by_their_key_tokens() -> None:
    found = [
        replace(outcome(case, name, 0.0), key_tokens=many, key_logp=logp)
        for name, many, losses in (("a", 3, 0.5), ("b", 1, 0.1), ("none", None, None))
        for case, logp in (("dense", None if losses is None else -1.0), ("dpxa", losses and -1.0 - losses))
    ]
    dense, dpxa = rows(found, "dense")
    assert dense["key_loss"] == 0.0 and dpxa["key_tokens"] == 4
    assert dpxa["key_loss"] == pytest.approx((3 * 0.5 + 0.1) / 4)
    assert dpxa["key_perplexity"] == pytest.approx(math.exp(1.0 + dpxa["key_loss"]))
    assert dpxa["key_perplexity_dense"] == pytest.approx(math.exp(1.0))
    assert dpxa["key_loss_95"] == pytest.approx([0.1, 0.5])
    assert ["key_tokens" in one for one in dpxa["by_document"]] == [True, True, False]
    assert "key_loss" not in rows(OUTCOMES[:1], "dense")[0]


def task_rows(task: str, *documents: tuple[list[bool], list[bool]]) -> list[Outcome]:
    """Make outcomes of a task. Each document says which questions dense and dpxa answer exactly."""
    return [
        replace(outcome(case, f"{task}-{at}", 0.0, *exacts), task=task)
        for at, both in enumerate(documents)
        for case, exacts in zip(("dense", "dpxa"), both, strict=True)
    ]


def test_pools_only_tasks_where_dense_answers_at_least_half() -> None:
    found = rows(
        [
            *task_rows("half", ([True, False], [False, False]), ([True, False], [True, True])),
            *task_rows("less", ([True, False, False], [True, True, True])),
            *task_rows("all", ([True], [True]), ([True], [True])),
            replace(outcome("dense", "p", 0.0), task="prose"),
            replace(outcome("dpxa", "p", 0.1), task="prose"),
        ],
        "dense",
    )
    assert {row["task"]: judged(row) for row in found} == {
        "half": True, "less": False, "all": True, "prose": False
    }  # fmt: skip
    dense, dpxa = together(found)
    assert (dense["exact"], dense["lost"], dense["ratio_95"]) == (4, 0, [1.0, 1.0])
    assert dpxa["tasks"] == ["half", "all"] and dpxa["documents"] == 4
    assert (dpxa["exact"], dpxa["exact_dense"], dpxa["questions"]) == (4, 4, 6)
    assert (dpxa["lost"], dpxa["won"]) == (1, 1)
    assert tuple(dpxa["ratio_95"]) == bootstrap_ratio([(0, 1), (2, 1), (1, 1), (1, 1)])
    assert "| 4 of 6 (4) | 1.000, " in together_table([dpxa])
    assert "1 of 3 (1), not judged" in table(found) and "2 of 4 (2) |" in table(found)
    assert together(rows(task_rows("all", ([True], [True])), "dense")) == [], "one task is its own row"


def test_reports_rows_that_differ_from_the_recorded_result() -> None:
    found = rows(OUTCOMES, "dense")
    assert apart(found, found) == []
    near = [{**row, "kl": row["kl"] * 1.04} if "kl" in row else row for row in found]
    assert apart(near, found) == []
    far = [found[0], {**found[1], "kl": 0.6, "density": 0.26, "exact": 4}]
    where = "dpxa:tau=0.5, needles, 4096 tokens"
    assert apart(far, found) == [
        f"{where}: density is 0.26, 0.25 was recorded",
        f"{where}: kl is 0.6, 0.5 was recorded",
        f"{where}: exact is 4, 5 was recorded",
        "decode 3:16, needles, 4096 tokens: not run",
    ]
    assert apart(found, found[:2]) == ["decode 3:16, needles, 4096 tokens: not recorded"]
    missing = [{key: value for key, value in found[0].items() if key != "kl"}, *found[1:]]
    assert apart(missing, found) == ["dense, needles, 4096 tokens: kl is None, 0.0 was recorded"]


def test_gives_no_interval_for_a_single_document() -> None:
    (row,) = rows(OUTCOMES[:1], "dense")
    assert "ratio_95" not in row and "logp_95" not in row and len(row["by_document"]) == 1


def test_rows_of_prose_have_no_answer_columns() -> None:
    (row,) = rows([replace(outcome("dense", "a", 0.0), task="prose")], "dense")
    assert "questions" not in row and row["perplexity"] == 8.0
    assert missed([parse_gate("dense:exact>=1")], [row]) == ["dense: no row has exact"]


def test_documents_without_questions_count_only_in_kl() -> None:
    """The first document has no questions, as when a text has no copies to ask for."""
    found = [outcome("dense", "none", 0.0), outcome("dpxa", "none", 0.5)]
    found += [outcome("dense", name, 0.0, True, True) for name in "ab"]
    found += [outcome("dpxa", name, 0.25, True, False) for name in "ab"]
    _dense, dpxa = rows(found, "dense")
    assert (dpxa["documents"], dpxa["questions"], dpxa["exact"]) == (3, 4, 2)
    assert dpxa["kl"] == pytest.approx(1 / 3)
    assert tuple(dpxa["ratio_95"]) == bootstrap_ratio([(1, 2), (1, 2)])


def test_failed_accuracy_gate_names_its_case_and_value() -> None:
    found = rows(OUTCOMES, "dense")
    assert missed([parse_gate("dpxa:tau=0.5:exact>=1,kl<=0.5,logp>=-0.1")], found) == []
    assert missed([parse_gate("dpxa:tau=0.5:kl<=0.11,density<=0.3")], found) == [
        "dpxa:tau=0.5, needles, 4096 tokens: kl is 0.5000, not <= 0.11"
    ]
    assert missed([parse_gate("decode 3:16:exact>=0.985")], found) == [
        "decode 3:16, needles, 4096 tokens: exact is 0.7500, not >= 0.985"
    ]
    assert missed([parse_gate("streaming:kl<=1")], found) == ["streaming: no row has kl"]
    nan = [{**found[1], "kl": math.nan}]
    assert len(missed([parse_gate("dpxa:tau=0.5:kl<=1")], nan)) == 1


@pytest.mark.parametrize("given", ["dpxa", "dpxa:", "dpxa:speed>=1", "dpxa:kl<0.1", "kl<=0.1", ":kl<=0.1"])
def test_refuses_malformed_accuracy_gates(given: str) -> None:
    with pytest.raises(ValueError, match="no gate"):
        parse_gate(given)
