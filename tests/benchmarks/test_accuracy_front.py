"""The Pareto front of page selections against its definition, and what is printed of it."""

from __future__ import annotations

import random

import pytest

from deltafront.benchmarks.accuracy.front import front_table, with_front
from deltafront.benchmarks.accuracy.report import Row


def row(case: str, ms: float, exact: int, logp: float, task: str = "needles") -> Row:
    return {
        "case": case,
        "task": task,
        "tokens": 4096,
        "density": 0.5,
        "ms": ms,
        "questions": 40,
        "exact": exact,
        "exact_dense": 40,
        "logp_difference": logp,
    }


@pytest.mark.parametrize("seed", range(20))
def test_front_holds_exactly_the_undominated_cases(seed: int) -> None:
    """Small whole numbers, so that ties are many."""
    draw = random.Random(seed)
    found = [
        row(f"decode 1:{i}", draw.randint(1, 4) / 8, draw.randint(37, 40), -draw.randint(0, 3) / 4)
        for i in range(8)
    ]
    for one in with_front(found):
        ms, exact, logp = one["ms"], one["exact"], one["logp_difference"]
        no_worse = [
            (r["ms"], r["exact"], r["logp_difference"])
            for r in found
            if r["ms"] <= ms and r["exact"] >= exact and r["logp_difference"] >= logp
        ]
        assert one["front"] == (set(no_worse) == {(ms, exact, logp)})


def test_only_page_selections_of_the_same_documents_compete() -> None:
    prose = {"case": "decode 3:8", "task": "prose", "tokens": 4096, "ms": 0.1}
    found = [
        row("dense", 1.0, 40, 0.0),
        row("dpxa", 0.01, 40, 0.0),
        row("decode 8,14:64", 0.3, 38, -0.2),
        row("decode 8:64", 0.2, 38, -0.1),
        row("decode 8:64", 0.1, 40, 0.0, task="haystack"),
        prose,
    ]
    marked = with_front(found)
    assert [one.get("front") for one in marked] == [None, None, False, True, True, None]
    assert "front" not in found[2], "the rows given stay as they are"
    lines = front_table(found).splitlines()
    assert lines[2:] == [
        "| 4096 | haystack | `8:64` | 0.500 | 0.1 | 40 of 40, 1.000 | +0.000 | yes |",
        "| 4096 | needles | `8:64` | 0.500 | 0.2 | 38 of 40, 0.950 | -0.100 | yes |",
        "| 4096 | needles | `8,14:64` | 0.500 | 0.3 | 38 of 40, 0.950 | -0.200 |  |",
    ]
    assert front_table(found[:2]) == ""
