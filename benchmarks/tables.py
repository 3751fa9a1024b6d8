"""Writes the tables in README and docs, most of them from benchmarks/results/*.json, and README's chart.

    python -m deltafront.benchmarks.tables [--check]

Each table replaces the text between its markers, such as `<!-- table: kernels_h200 -->` and `<!-- end -->`.
With --check the script writes nothing; it exits with 1 if a table or the chart is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from deltafront.benchmarks import configuration, overlays
from deltafront.benchmarks import frontier as frontiers
from deltafront.benchmarks import headline as headlines
from deltafront.benchmarks.accuracy.tables import EMBEDDED, accuracy, embedded
from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.markdown import Result, markdown, provenance
from deltafront.benchmarks.models.tables import families, public_models
from deltafront.benchmarks.paper_forms import table as paper_forms
from deltafront.service.cli import size

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_DOCS = ("configuration", "performance", "accuracy", "operations", "deploy", "models", "methods")
CHART = ROOT / "docs" / "first_token.svg"
FRONTIER = ROOT / "docs" / "frontier.svg"
DOCUMENTS = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _DOCS))


def kernels(result: Result) -> str:
    forms = {"ms": ".4g", "tflops": ".0f", "density": ".3f", "ratio": ".2f"}
    rows = [
        [
            row["case"],
            row["tokens"],
            *(format(row[key], form) if key in row else None for key, form in forms.items()),
            _without_input(row.get("note", "")),
        ]
        for row in result["rows"]
        if row["tokens"] >= 131_072
    ]
    header = ("case", "tokens", "ms", "TFLOP/s", "density", "ratio", "note")
    return markdown(header, rows) + provenance(result)


def _without_input(note: str) -> str:
    """Leave out the statistics of a selection's random input."""
    return "; ".join(part for part in note.split("; ") if not part.startswith("q_adjacent_cosine"))


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


def headline(engine_of_8b: Result) -> str:
    shown = headlines.times(engine_of_8b).values()
    timed = ", ".join(sorted({row.get("commit", engine_of_8b["commit"])[:8] for row in shown}))
    lines = headlines.lines(engine_of_8b)
    return markdown(headlines.HEADER, lines) + f"\n\n{engine_of_8b['gpu']}, medians, commits {timed}."


_TIMES = ("ttft_", "token_", "batch4_token_", "vllm_ttft", "vllm_token", "vllm_batch4")
_EARLIER = ("313a2b3", "3c7fe4a", "7c54588")
"""Commits whose rows a later commit measured again in another way. The table omits them."""


def engine(result: Result) -> str:
    """Make the table of TTFT and decode times. The KV cache has 16 bits unless a row says otherwise."""
    header = ("case", "tokens", "prefill GPUs", "density", "value", "decode on", "commit")
    rows = [
        [
            f"{row['case']} ({row['shape']})" if "shape" in row else row["case"],
            row["tokens"] or None,
            row["gpus"],
            f"{row['density']:.3f}" if row["density"] is not None else None,
            f"{row['value']:.4g} {row['unit']}",
            "vLLM" if row["case"].startswith("vllm_") else _decodes_on(row),
            row.get("commit", result["commit"])[:8],
        ]
        for row in result["rows"]
        if row["case"].startswith(_TIMES)
        and row["unit"] in ("s", "ms")
        and row.get("kv_dtype") != "fp8"
        and row.get("commit") not in _EARLIER
    ]
    return markdown(header, rows) + f"\n\n{result['gpu']}; medians."


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


def products(result: Result) -> str:
    header = ("product", "rows", "ms", "TFLOP/s", "cuBLAS, ms", "over cuBLAS")
    keys = ("case", "rows", "ms", "tflops", "cublas_ms", "ratio")
    layers = [row for row in result["rows"] if row["case"] == "layer"]
    return markdown(header, [[row[key] for key in keys] for row in layers]) + provenance(result)


def chaos(result: Result) -> str:
    """Make the table of chaos runs: for each case, the number of tries and of failed tries (`bad`). A
    result's `note` says how it was run, at which commit."""
    rows = [[f"`{row['case']}`", row["tries"], row["bad"]] for row in result["rows"]]
    return markdown(("case", "tries", "bad"), rows)


GPUS_GIB = (79.0, 139.0, 267.0)
"""GPU memory that a process can use: of an H100 (80 GB), an H200 (141 GB) and a B300 (288 GB)."""


def sizing() -> str:
    """Make the table of `deltafront size` for 8B and 70B at 128K and 512K. It is computed, not measured."""
    rows = [
        size.row(size.sizing(name, shape, tokens, concurrency, gpu))
        for name, shape in size.SHAPES.items()
        for tokens in (131_072, 524_288)
        for gpu in GPUS_GIB
        for concurrency in (1, 8)
    ]
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


TABLES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "headline": (headline, ("engine_h200",)),
    "answers": (headlines.answers, ("answers_real_models",)),
    "answers_all": (lambda result: headlines.answers(result, readme=False), ("answers_real_models",)),
    "embedded": (embedded, EMBEDDED),
    "kernels_h200": (kernels, ("kernels_h200",)),
    "accuracy_kv_int8_h100": (accuracy, ("accuracy_kv_int8_h100",)),
    "accuracy_demo_cpu": (accuracy, ("accuracy_demo_cpu",)),
    "paper_forms": (paper_forms.forms, paper_forms.SOURCES),
    "engine_h200": (engine, ("engine_h200",)),
    "engine_h100": (engine, ("engine_h100",)),
    "products_h200": (products, ("products_h200",)),
    "service_overhead": (service_overhead, ("service_overhead",)),
    "chaos": (chaos, ("chaos",)),
    **{f"{name}_keys": (partial(configuration.table, name), ()) for name in configuration.SECTIONS},
    "sizing": (sizing, ()),
    "families": (families, ()),
    "public_models": (public_models, ()),
    "overlays": (lambda: markdown(overlays.HEADER, overlays.rows()), ()),
}
"""For each table: the function that makes it, and the results files it reads."""


def render(document: str) -> str:
    """Replace every marked table of a document. Raises KeyError for an unknown table."""

    def fill(match: re.Match[str]) -> str:
        make, sources = TABLES[match[1]]
        table = make(*(json.loads((RESULTS / f"{source}.json").read_text()) for source in sources))
        return f"<!-- table: {match[1]} -->\n{table}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, document, flags=re.DOTALL)


def chart() -> str:
    """Return README's chart."""
    return headlines.chart(json.loads((RESULTS / "engine_h200.json").read_text()))


def frontier() -> str:
    """Return the plot of accuracy.md."""
    return frontiers.svg(json.loads((RESULTS / "answers_real_models.json").read_text()))


def _stale() -> dict[Path, str]:
    """Return the new content of each file that is out of date."""
    wanted = {path: render(path.read_text()) for path in DOCUMENTS}
    wanted |= {CHART: chart(), FRONTIER: frontier()}
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = _stale()
    for path, text in stale.items():
        if arguments.check:
            print(f"not up to date: {path.name}", file=sys.stderr)
        else:
            path.write_text(text)
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
