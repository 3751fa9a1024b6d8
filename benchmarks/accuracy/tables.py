"""Makes the accuracy tables from benchmarks/results/accuracy_*.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deltafront.benchmarks.markdown import Result, markdown, provenance

_OVER_DOCUMENTS = "of dense's, 95% over documents"


def accuracy(result: Result) -> str:
    header = (
        "case", "tokens", "density", "ms", "KL", "exact", _OVER_DOCUMENTS, "lost, won", "logp − dense's",
    )  # fmt: skip
    rows = [
        [
            f"`{row['case']}`",
            row["tokens"],
            f"{row['density']:.3f}",
            f"{row['ms']:.0f}",
            f"{row['kl']:.3f}",
            f"{row['exact']} of {row['questions']}",
            kept(row),
            f"{len(row['lost'])}, {len(row['won'])}",
            f"{row['logp_difference']:+.3f}",
        ]
        for row in result["rows"]
    ]
    return markdown(header, rows) + provenance(result, "")


def kept(row: Mapping[str, Any]) -> str:
    """Format exact answers as a share of the baseline's, with the interval over documents if known."""
    if not row["exact_dense"]:
        return "–"
    share = f"{row['exact'] / row['exact_dense']:.3f}"
    if not row.get("ratio_95") or not (row["lost"] or row["won"]):
        return share
    low, high = row["ratio_95"]
    return f"{share} ({low:.3f} to {high:.3f})"


def served(result: Result) -> str:
    """Make the table of exact answers of the service. Its columns lost and won count questions that only the
    first row's case, or only this row's case, answers exactly."""
    header = (
        "task", "case", "method", "decode", "tokens", "density", "pages", "computed again", "first token, s",
        "exact", "of the first row's, 95% over documents", "lost, won; p over questions", "same answers",
    )  # fmt: skip
    rows = [
        [
            row["task"],
            row["case"],
            f"`{row['method']}`",
            row["decode"],
            row["tokens"],
            f"{row['density']:.3f}",
            f"{row['page_share']:.3f}",
            row.get("recomputed_tokens", ""),
            f"{row['ttft_s']:.1f}",
            f"{row['exact']} of {row['questions']}",
            kept(row),
            f"{len(row['lost'])}, {len(row['won'])}; {row['p']:.2g}",
            row["same"],
        ]
        for row in result["rows"]
    ]
    return markdown(header, rows) + provenance(result, "")


EMBEDDED = (
    "accuracy_h200", "accuracy_long_h100", "accuracy_fp8_h200", "accuracy_served_h200",
    "accuracy_forms_decode_h100",
)  # fmt: skip
_UNTUNED = "code that nothing was tuned on"
_ALONE = "`dpxa`, shipped level"
_ROWS: Sequence[tuple[int, str, str, str]] = (
    (1, "dpxa:density=0.075", _ALONE, _UNTUNED),
    (0, "dpxa_default_alone", _ALONE, "set B, on which the level was settled"),
    (0, "dpxa_alone", "`dpxa`, an earlier, denser level", "set A, on which the anchors were settled"),
    (0, "dpxa_default", f"{_ALONE}, 8 recomputed blocks", "set B"),
    (3, "dpxa", f"{_ALONE}, 8 recomputed blocks, through gRPC", _UNTUNED),
    (3, "shipped", "the same with DELTA in decode, as shipped", _UNTUNED),
    (2, "dense fp8", "dense, FP8 weights", _UNTUNED),
    (2, "dpxa:density=0.075 fp8", f"{_ALONE}, FP8 weights", _UNTUNED),
    (4, "decode 8,14,18,21:64", "dense prefill, DELTA with 64 pages", _UNTUNED),
    (4, "decode 8,14,18,21:256", "dense prefill, DELTA with 256 pages", _UNTUNED),
)
"""Index of the results file in EMBEDDED, the case, and the table's names of case and documents."""


def embedded(*results: Result) -> str:
    """Make the table of the embedded model's answers at its longest prompts."""
    header = ("setting", "documents", "density", "right, dense", "right", "kept, 95%", "lost, won")
    lines = [
        [
            setting,
            f"{row['documents']}, {documents}",
            f"{row['density']:.3f}",
            f"{row['exact_dense']} of {row['questions']}",
            row["exact"],
            kept(row),
            f"{_count(row['lost'])}, {_count(row['won'])}",
        ]
        for at, case, setting, documents in _ROWS
        for row in (_longest(results[at], case),)
    ]
    return markdown(header, lines)


def _longest(result: Result, case: str) -> Mapping[str, Any]:
    """Return the row of the task `needles` with the longest documents."""
    rows = [row for row in result["rows"] if row["case"] == case and row.get("task", "needles") == "needles"]
    found: Mapping[str, Any] = max(rows, key=lambda row: row["tokens"])
    return found


def _count(questions: int | Sequence[object]) -> int:
    return questions if isinstance(questions, int) else len(questions)
