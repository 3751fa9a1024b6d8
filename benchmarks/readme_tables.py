"""Write the README's tables from benchmarks/results/*.json, between their markers.

    python -m deltafront.benchmarks.readme_tables [--check]

`<!-- table: kernels_h200 -->` … `<!-- end -->` in README.md is replaced by the table of that name. With
--check nothing is written, and the exit code says whether the README is up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Result = dict[str, Any]


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def provenance(result: Result, what: str = "; medians") -> str:
    parts = [str(result[key]) for key in ("gpu", "hardware", "machine") if result.get(key)]
    parts += [f"{key} {result[key]}" for key in ("commit", "torch", "triton") if result.get(key)]
    text = f" Text: {result['text']}." if result.get("text") else ""
    note = f" {result['note'][0].upper()}{result['note'][1:]}." if result.get("note") else ""
    return f"\n\n{', '.join(parts)}{what}.{text}{note}"


def kernels(result: Result) -> str:
    forms = {"ms": ".4g", "tflops": ".0f", "density": ".3f", "ratio": ".2f"}
    rows = [
        [
            row["case"],
            row["tokens"],
            *(format(row[key], form) if key in row else None for key, form in forms.items()),
            row.get("note"),
        ]
        for row in result["rows"]
    ]
    header = ("case", "tokens", "ms", "TFLOP/s", "density", "ratio", "note")
    return markdown(header, rows) + provenance(result)


def recall(result: Result) -> str:
    keys = ("estimator", "tokens", "coverage_75", "coverage_90", "coverage_95")
    header = ("estimator", "tokens", "75% coverage", "90%", "95%")
    return markdown(header, [[row.get(key) for key in keys] for row in result["rows"]]) + provenance(result)


def long_context(result: Result) -> str:
    header = (
        "text",
        "method",
        "tokens",
        "exact, full decode",
        "exact, DELTA decode",
        "TTFT s",
        "density",
        "scoring ÷ attention",
    )
    rows = [
        [
            row["text"],
            row["method"],
            row["tokens"],
            f"{row['exact_full_decode']} of {row['asked']}",
            f"{row['exact_delta_decode']} of {row['asked']}",
            row["ttft_s"],
            row["density"],
            row["scoring_over_attention"],
        ]
        for row in result["rows"]
    ]
    return markdown(header, rows) + provenance(result)


def precision(result: Result) -> str:
    """A line for each document; methods side by side in each number format, with their sums."""
    columns = list(dict.fromkeys((row["method"], row["dtype"]) for row in result["rows"]))
    found = {(row["text"], row["seed"], row["method"], row["dtype"]): row["exact"] for row in result["rows"]}
    asked = {(row["text"], row["seed"]): row["asked"] for row in result["rows"]}
    lines = [
        [text, seed, count, *(found.get((text, seed, *column)) for column in columns)]
        for (text, seed), count in asked.items()
    ]
    sums = [sum(line[at] or 0 for line in lines) for at in range(2, 3 + len(columns))]
    header = ("text", "seed", "asked", *(f"{method}, {dtype}" for method, dtype in columns))
    return markdown(header, [*lines, ["all", None, *sums]]) + provenance(result, "; exact answers")


def service_overhead(result: Result) -> str:
    rows = [
        [
            row["tokens"],
            row["service_s"],
            row["one_stage_s"],
            f"{row['over_one_stage']:+.1%}",
            row["same_stages_s"],
            f"{row['over_same_stages']:+.1%}",
        ]
        for row in result["rows"]
    ]
    header = (
        "tokens",
        "TTFT over gRPC s",
        "one process, one stage s",
        "over it",
        "one process, same stages s",
        "over it",
    )
    memory = f"\n\nResident memory of all processes: {result['resident_gib']} GiB."
    return markdown(header, rows) + memory + provenance(result)


TABLES: dict[str, Callable[[Result], str]] = {
    "kernels_h200": kernels,
    "recall_h200": recall,
    "recall_prose_h200": recall,
    "long_context_h200": long_context,
    "precision_h200": precision,
    "service_overhead": service_overhead,
}


def render(readme: str) -> str:
    """The README with every marked table replaced. Raises KeyError for a table nobody makes."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        table = TABLES[name](json.loads((RESULTS / f"{name}.json").read_text()))
        return f"<!-- table: {name} -->\n{table}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, readme, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    path = ROOT / "README.md"
    before = path.read_text()
    after = render(before)
    if arguments.check:
        return int(before != after)
    path.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
