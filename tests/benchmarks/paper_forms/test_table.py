"""The table of every method at 130,500 tokens."""

from __future__ import annotations

import json
from typing import Any

from deltafront.benchmarks.paper_forms.table import ROWS, SOURCES, WITHOUT_KERNELS, forms
from deltafront.benchmarks.tables import RESULTS


def sources() -> list[dict[str, Any]]:
    return [json.loads((RESULTS / f"{name}.json").read_text()) for name in SOURCES]


def test_its_rows_are_of_the_same_documents() -> None:
    needles = [row for source in sources() for row in source["rows"] if row["task"] == "needles"]
    assert {row["tokens"] for row in needles} == {130_500}
    documents = [{one["document"] for one in row["by_document"]} for row in needles]
    assert all(names == documents[0] and len(names) == 21 for names in documents)


def test_every_row_of_the_files_is_shown_but_dense_and_what_an_idea_is_compared_with() -> None:
    shown = {(source, case) for _, _, source, case in ROWS}
    left = {
        row["case"]
        for number, source in enumerate(sources())
        for row in source["rows"]
        if (number, row["case"]) not in shown
    }
    again = {"streaming", "xattention:share=0.07"}  # shown by another file
    rivals = {case for case in left if "min_tokens=0" in case}
    assert left - rivals - again == {"dense"}
    assert len(rivals) == 4


def test_time_is_over_dense_attention_of_the_same_run() -> None:
    of = sources()
    table = forms(*of)
    for _, _, number, case in ROWS:
        (line,) = (line for line in table.splitlines() if f"(`{case}`)" in line)
        ms = {row["case"]: row["ms"] for row in of[number]["rows"] if row["task"] == "needles"}
        expected = f"{ms[case] / ms['dense']:.2f}"
        assert line.endswith("| not timed |" if case.startswith(WITHOUT_KERNELS) else f"| {expected} |")
