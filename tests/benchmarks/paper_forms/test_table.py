"""Tests the table of the papers' methods at 130,500 tokens."""

from __future__ import annotations

import json
from typing import Any

from deltafront.benchmarks.accuracy.__main__ import METHODS
from deltafront.benchmarks.paper_forms.table import CASES_TODAY, NO_KERNELS, ROWS, SOURCES, forms
from deltafront.benchmarks.tables import RESULTS
from deltafront.kernels.methods import PRESETS, load
from deltafront.workers.evaluation.setting import known_method

for module in METHODS:
    load(module)


def needles() -> list[dict[str, dict[str, Any]]]:
    """Return the rows of the task `needles`: for each results file, rows by case."""
    sources = [json.loads((RESULTS / f"{name}.json").read_text()) for name in SOURCES]
    return [{row["case"]: row for row in of["rows"] if row["task"] == "needles"} for of in sources]


def test_table_rows_have_the_same_documents_and_questions() -> None:
    rows = [row for of in needles() for row in of.values()]
    assert {row["tokens"] for row in rows} == {130_500}
    asked = [{one["document"]: one["questions"] for one in row["by_document"]} for row in rows]
    assert len(asked[0]) == 21 and all(one == asked[0] for one in asked)
    answered = [{one["document"]: one["exact_dense"] for one in row["by_document"]} for row in rows]
    assert all(abs(one[name] - answered[0][name]) <= 1 for one in answered for name in one)


def test_table_shows_all_measured_cases_except_baselines() -> None:
    shown = {(source, case) for _, _, source, case in ROWS}
    left = {case for number, of in enumerate(needles()) for case in of if (number, case) not in shown}
    assert left == {"dense", "streaming", "xattention:share=0.07"}  # the last two are shown from another file


def test_table_times_are_relative_to_dense_attention_of_one_run() -> None:
    of = needles()
    table = forms(*({"rows": [*rows.values()]} for rows in of))
    lines = table.splitlines()[2:]
    assert len(lines) == len(ROWS)
    for line, (_, _, number, case) in zip(lines, ROWS, strict=True):
        time = line.split(" | ")[-2]
        ratio = of[number][case]["ms"] / of[number]["dense"]["ms"]
        assert time == ("left out" if case.startswith(NO_KERNELS) else f"{ratio:.2f}")


def test_every_case_in_the_table_is_a_known_method() -> None:
    assert all(known_method(CASES_TODAY.get(case, case)) for *_, case in ROWS)


def test_benchmark_methods_register_under_the_benchmarks_package() -> None:
    """A process that runs such a method imports only the module of the method's options."""
    for name, preset in PRESETS.items():
        parts = [part for part in (preset.selector, preset.backend) if isinstance(part, str)]
        if any(part.startswith("deltafront.benchmarks.") for part in parts):
            assert preset.module.startswith("deltafront.benchmarks."), name
