"""Tests which measurements README's tables and chart compare."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from deltafront.benchmarks import frontier, headline
from deltafront.benchmarks.accuracy.tables import EMBEDDED, embedded
from deltafront.benchmarks.tables import RESULTS, TABLES


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


@pytest.fixture
def lines() -> list[headline.Line]:
    return headline.lines(*map(results, TABLES["headline"][1]))


def test_gives_no_ratio_for_times_of_different_commits() -> None:
    ours, other = ({"value": value, "unit": "s"} for value in (2.0, 3.0))
    assert headline._timed("a", ours, (other, "dense"))[2:] == ("3 s (dense)", "1.50 ×")
    _, _, beside, ratio = headline._timed("a", ours, ({**other, "commit": "old"}, "dense"))
    assert (beside, ratio) == ("3 s (dense, another commit)", "")


def test_compares_ttft_with_vllms_of_the_same_commit(lines: list[headline.Line]) -> None:
    of = headline.times(results("engine_h200"))
    theirs = of["vllm_ttft_dense"]
    dense, sparse = of["mapped ttft_dense"], of[headline._SPARSE]
    for ours, line in zip((dense, sparse), lines, strict=False):
        assert ours.get("commit") == theirs.get("commit")
        assert line[1] == f"{ours['value']:.3g} s"
        assert line[2].startswith(f"{theirs['value']:.3g} s (vLLM 0.26.0, dense)")
        assert line[3].startswith(f"{theirs['value'] / ours['value']:.2f} ×")


def test_compares_several_gpus_with_dense_on_the_same_gpus(lines: list[headline.Line]) -> None:
    (several,) = (line for line in lines if f"{headline.LONGEST:,} tokens" in line[0])
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


def test_accuracy_table_begins_with_untuned_documents() -> None:
    first, *others = embedded(*map(results, EMBEDDED)).splitlines()[2:]
    assert "nothing was tuned on" in first
    assert any("set A" in line for line in others) and any("set B" in line for line in others)


def test_plot_has_a_point_for_each_setting_by_density_and_kept_score() -> None:
    row = {"size": "1B", "tokens": 9, "method": "a", "blocks": 0, "samples": 60, "dense": "0.79–0.81"}
    rows = [{**row, "density": density, "score": score} for density, score in ((0.1, 0.8), (0.4, 0.6))]
    drawn = frontier.svg({"rows": [*rows, {**rows[0], "method": "dense/delta_layers=2"}]})
    points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="3.0".*?<title>(.*?)</title>', drawn)
    (left, high, first), (right, low, second) = points
    assert float(left) < float(right) and float(high) < float(low), "SVG counts downwards"
    assert (first, second) == ("a, 0 blocks: 1.000 of 60 samples", "a, 0 blocks: 0.750 of 60 samples")
