"""Write the tables of README and docs, between their markers: most from benchmarks/results/*.json.

    python -m deltafront.benchmarks.tables [--check]

`<!-- table: kernels_h200 -->` … `<!-- end -->` is replaced by the table of that name. With --check nothing is
written, and the exit code says whether the documents are up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ..service.cli import size
from . import headline as headlines
from . import overlays
from .accuracy.tables import (
    accuracy,
    baselines,
    equal_time,
    held_out,
    held_out_decode,
    held_out_runs,
    served,
)
from .markdown import Result, markdown, provenance
from .models.tables import families, public_models
from .paper_forms import table as paper_forms

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_DOCS = ("performance", "deploy", "models", "methods")
DOCUMENTS = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _DOCS))


def kernels(result: Result) -> str:
    forms = {"ms": ".4g", "tflops": ".0f", "density": ".3f", "ratio": ".2f"}
    rows = [
        [
            row["case"],
            row["tokens"],
            *(format(row[key], form) if key in row else None for key, form in forms.items()),
            row.get("note"),
        ]
        for row in map(_as_it_is_now, result["rows"])
    ]
    header = ("case", "tokens", "ms", "TFLOP/s", "density", "ratio", "note")
    return markdown(header, rows) + provenance(result)


def _as_it_is_now(row: Result) -> Result:
    """A ratio is of the kernel as it is, where `since` says how much longer it takes than the one timed."""
    if "since" not in row:
        return row
    since = row["since"]
    note = f"{row['note']}; ratio of commit {since['commit']}, which takes {since['times']:.3f} times as long"
    return {**row, "ratio": row["ratio"] / since["times"], "note": note}


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


def headline(engine_of_8b: Result, held_out: Result, untuned: Result, *others: Result) -> str:
    commits = ", ".join(dict.fromkeys(result["commit"][:8] for result in (untuned, *others)))
    cards = " and ".join(sorted({result["hardware"].removeprefix("one ") for result in (untuned, *others)}))
    shown = headlines.times(engine_of_8b).values()
    timed = ", ".join(sorted({row.get("commit", engine_of_8b["commit"])[:8] for row in shown}))
    sources = (
        f"Times: {engine_of_8b['gpu']}, medians, commit {timed}."
        f" Answers of sets A and B: {held_out['gpu']}, of other documents and KL: {cards},"
        f" commits {commits}; all of the 135M model, to questions of the form that its adapter was"
        " trained on, as a share of those without the saving; in brackets 95% of what documents drawn with"
        " replacement give, where the results hold it. docs/performance.md names each row's commit and each"
        " set's documents, docs/experiments the others."
    )
    lines = headlines.lines(engine_of_8b, held_out, untuned, *others)
    return markdown(headlines.HEADER, lines) + f"\n\n{sources}"


def engine(result: Result) -> str:
    """A line for each row; where it stands beside the value, the commit that it is of."""
    header = ("case", "tokens", "prefill GPUs", "density", "value", "decode on", "where it went, s", "commit")
    rows = [
        [
            f"{row['case']} ({row['shape']})" if "shape" in row else row["case"],
            row["tokens"] or None,
            row["gpus"],
            f"{row['density']:.3f}" if row["density"] is not None else None,
            f"{row['value']:.4g} {row['unit']}",
            "vLLM" if row["case"].startswith("vllm_") else _decodes_on(row),
            _largest(row.get("parts", {})),
            row.get("commit"),
        ]
        for row in result["rows"]
    ]
    return markdown(header, rows) + provenance(result)


def _decodes_on(row: Result) -> str | None:
    places = {
        "own": "its own GPU",
        "last": "a stage's GPU",
        "mapped": "the stage's GPU, one copy",
        "none": "no GPU",
        "alone": "one GPU, no service",
    }
    where = places.get(row.get("decode_gpu", ""))
    if (ranks := row.get("ranks", 1)) > 1:
        whose = "their own" if row.get("decode_gpu") == "own" else "stages'"
        where = f"{ranks} ranks on {whose} GPUs"
    kind = f"K/V {row['kv_dtype']}" if "kv_dtype" in row else None
    return ", ".join(filter(None, (where, kind))) or None


def _largest(parts: Mapping[str, float]) -> str:
    """The parts of a time to first token that are a hundredth of it or more."""
    total = sum(parts.values())
    shown = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{name.removeprefix('prefill.')} {value:.3g}" for name, value in shown if value > total / 100
    )


def products(result: Result) -> str:
    header = ("product", "rows", "ms", "TFLOP/s", "cuBLAS, ms", "over cuBLAS")
    keys = ("case", "rows", "ms", "tflops", "cublas_ms", "ratio")
    return markdown(header, [[row[key] for key in keys] for row in result["rows"]]) + provenance(result)


def chaos(result: Result) -> str:
    rows = [[f"`{row['case']}`", row["tries"], row["bad"], row["note"]] for row in result["rows"]]
    return markdown(("case", "tries", "bad", "note"), rows) + provenance(result, "")


GPUS_GIB = (79.0, 139.0, 267.0)
"""About what a process can have of an H100's 80 GB, an H200's 141 GB and a B300's 288 GB."""


def sizing() -> str:
    """Computed, not measured: `deltafront size` for 8B and 70B at 128K and 512K."""
    rows = [
        size.row(size.sizing(name, shape, tokens, concurrency, gpu))
        for name, shape in size.SHAPES.items()
        for tokens in (131_072, 524_288)
        for gpu in GPUS_GIB
        for concurrency in (1, 8)
    ]
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


TABLES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "headline": (
        headline,
        (
            "engine_h200",
            "accuracy_h200",
            "accuracy_long_h100",
            "accuracy_fp8_h200",
            "accuracy_far_h200",
            "accuracy_served_h200",
            "accuracy_forms_decode_h100",
        ),
    ),
    "kernels_h200": (kernels, ("kernels_h200",)),
    "recall_h200": (recall, ("recall_h200",)),
    "recall_prose_h200": (recall, ("recall_prose_h200",)),
    "long_context_h200": (long_context, ("long_context_h200",)),
    "accuracy_rules_h200": (accuracy, ("accuracy_rules_h200",)),
    "accuracy_kv_int8_h100": (accuracy, ("accuracy_kv_int8_h100",)),
    "accuracy_h200": (held_out, ("accuracy_h200",)),
    "accuracy_equal_time_h200": (equal_time, ("accuracy_equal_time_h200",)),
    "accuracy_decode_h200": (held_out_decode, ("accuracy_h200",)),
    "accuracy_runs_h200": (held_out_runs, ("accuracy_h200",)),
    "accuracy_demo_cpu": (accuracy, ("accuracy_demo_cpu",)),
    "accuracy_baselines_cpu": (baselines, ("accuracy_baselines_cpu",)),
    "accuracy_served_cpu": (served, ("accuracy_served_cpu",)),
    "paper_forms": (paper_forms.forms, paper_forms.SOURCES),
    "precision_h200": (precision, ("precision_h200",)),
    "engine_h200": (engine, ("engine_h200",)),
    "engine_h100": (engine, ("engine_h100",)),
    "products_h200": (products, ("products_h200",)),
    "service_overhead": (service_overhead, ("service_overhead",)),
    "chaos": (chaos, ("chaos",)),
    "sizing": (sizing, ()),
    "families": (families, ()),
    "public_models": (public_models, ()),
    "overlays": (lambda: markdown(overlays.HEADER, overlays.rows()), ()),
    "overlay_sizes": (lambda: markdown(overlays.FITS_HEADER, list(overlays.fits())), ()),
}
"""What makes a table, and from which results."""


def render(document: str) -> str:
    """The document with every marked table replaced. Raises KeyError for a table nobody makes."""

    def fill(match: re.Match[str]) -> str:
        make, sources = TABLES[match[1]]
        table = make(*(json.loads((RESULTS / f"{source}.json").read_text()) for source in sources))
        return f"<!-- table: {match[1]} -->\n{table}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, document, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = [path for path in DOCUMENTS if render(path.read_text()) != path.read_text()]
    if arguments.check:
        for path in stale:
            print(f"not up to date: {path.name}", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(render(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
