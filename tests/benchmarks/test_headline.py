"""README's table: what may stand beside what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deltafront.benchmarks import headline
from deltafront.benchmarks.accuracy.tables import kept
from deltafront.benchmarks.tables import RESULTS, TABLES, kernels


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


@pytest.fixture
def lines() -> list[headline.Line]:
    return headline.lines(*map(results, TABLES["headline"][1]))


def test_every_row_has_speed_and_answers(lines: list[headline.Line]) -> None:
    assert all(what and ours and other and answers for what, ours, other, _faster, answers in lines)


def test_sparse_prefills_answers_are_of_both_sets_of_documents(lines: list[headline.Line]) -> None:
    assert "set A" in lines[0][4] and "set B" in lines[0][4]


def test_sparse_prefills_answers_begin_with_those_at_the_density_that_is_timed(
    lines: list[headline.Line],
) -> None:
    what, answers = lines[0][0], lines[0][4]
    timed = float(what.rpartition("density ")[2].rstrip(")"))
    assert "nothing was tuned on" in answers.partition(";")[0]
    assert float(answers.partition("at density ")[2].partition(",")[0]) == pytest.approx(timed, abs=0.002)


def test_times_of_two_commits_give_no_ratio() -> None:
    ours, other = ({"value": value, "unit": "s"} for value in (2.0, 3.0))
    assert headline._timed("a", ours, (other, "dense"))[2:] == ("3 s (dense)", "1.50 ×")
    _, _, beside, ratio = headline._timed("a", ours, ({**other, "commit": "old"}, "dense"))
    assert (beside, ratio) == ("3 s (dense, another commit)", "")


def test_the_shipped_first_token_is_beside_vllm_of_the_same_run(lines: list[headline.Line]) -> None:
    (asked,) = (line for line in lines if "a prompt with its question" in line[0])
    of = headline.times(results("engine_h200"))
    ours, theirs = of["mapped ttft_dpxa_recompute_8"], of["vllm_ttft_dense"]
    assert ours.get("commit") == theirs.get("commit")
    assert asked[1:3] == (f"{ours['value']:.3g} s", f"{theirs['value']:.3g} s (vLLM 0.26.0, dense)")
    assert asked[3] == f"{theirs['value'] / ours['value']:.2f} ×"


def test_several_gpus_are_shown_beside_dense_attention_of_the_same_run(lines: list[headline.Line]) -> None:
    (several,) = (line for line in lines if "GPUs as stages" in line[0])
    of = {
        row["case"]: row["value"]
        for row in results("engine_h200")["rows"]
        if (row["tokens"], row["gpus"], row.get("ranks")) == (headline.LONGEST, 4, 4)
    }
    assert several[1:4] == (
        f"{of['ttft_dpxa']:.3g} s",
        f"{of['ttft_dense']:.3g} s (our dense attention)",
        f"{of['ttft_dense'] / of['ttft_dpxa']:.2f} ×",
    )
    assert "0.05)" in several[0] and "density 0.050" in several[4]


def test_the_pages_that_are_timed_are_those_whose_answers_are_shown(lines: list[headline.Line]) -> None:
    (pages,) = (line for line in lines if "selected pages" in line[0])
    (row,) = (row for row in results("accuracy_h200")["rows"] if row["case"] == "delta_256_pages")
    assert "256" in pages[0] and row["method"].endswith(":256") and kept(row) in pages[4]
    assert row["method"] == headline.SELECTED


def test_answers_on_text_that_nothing_was_tuned_on_come_first(lines: list[headline.Line]) -> None:
    for line in (line for line in lines if "set B" in line[4]):
        first, *others = line[4].split("; ")
        assert first.endswith("documents that nothing was tuned on")
        assert any("set B" in other for other in others)


def test_an_interval_stands_only_where_documents_were_drawn() -> None:
    row = {"exact": 9, "exact_dense": 10, "lost": 2, "won": 1}
    assert kept(row) == "0.900"
    assert kept({**row, "ratio_95": [0.8, 1.05]}) == "0.900 (0.800 to 1.050)"
    assert kept({**row, "exact": 10, "lost": [], "won": [], "ratio_95": [1.0, 1.0]}) == "1.000"


def test_a_kernels_ratio_is_of_the_kernel_as_it_is() -> None:
    row = {"case": "a", "tokens": 1, "ms": 2.0, "ratio": 1.2, "note": "n"}
    now = {**row, "since": {"commit": "abc", "times": 1.25}}
    text = kernels({"rows": [row, now]})
    assert "| 1.20 | n |" in text
    assert "| 0.96 | n; ratio of commit abc, which takes 1.250 times as long |" in text
