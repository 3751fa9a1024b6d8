"""Tables of answers and divergence, from benchmarks/results/accuracy_*.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..markdown import Result, markdown, provenance
from .front import DECODE, with_front

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
    """Exact answers as a share of the baseline's; where it was drawn, the interval over whole documents."""
    if not row["exact_dense"]:
        return "–"
    share = f"{row['exact'] / row['exact_dense']:.3f}"
    if not row.get("ratio_95") or not (row["lost"] or row["won"]):
        return share
    low, high = row["ratio_95"]
    return f"{share} ({low:.3f} to {high:.3f})"


def baselines(result: Result) -> str:
    """Methods in the forms that were run, each beside itself with the Δ correction."""
    of = {row["case"]: row for row in result["rows"]}
    header = ("density", "s", "KL", "exact", _OVER_DOCUMENTS, "logp − dense's")
    rows = []
    for case, row in of.items():
        name, _, options = case.partition(":")
        corrected = of.get(f"{name}+delta{options and ':'}{options}")
        if not name.endswith("+delta"):
            again = _read(corrected) if corrected else [None] * len(header)
            rows.append([f"`{case}`", result["forms"].get(case), *_read(row), *again])
    corrected_too = [f"{name}, with Δ" for name in header]
    return markdown(("method", "what was run", *header, *corrected_too), rows) + provenance(result, "")


def _read(row: Result) -> list[str]:
    return [
        f"{row['density']:.3f}",
        f"{row['ms'] / 1000:.1f}",
        f"{row['kl']:.3f}",
        f"{row['exact']} of {row['questions']}",
        kept(row),
        f"{row['logp_difference']:+.3f}",
    ]


def held_out(result: Result) -> str:
    """What methods read and what that does to answers, the longest documents first."""
    rows = [row for row in result["rows"] if not row["method"].startswith(DECODE)]
    return _paired(rows, "density") + provenance(result, "")


def held_out_decode(result: Result) -> str:
    """The same for page selections, whose density is of full decode's pages; which of them none beats."""
    rows = [row for row in result["rows"] if row["method"].startswith(DECODE)]
    tasks = ("haystack" if row["case"].endswith("_needles") else "needles" for row in rows)
    alike = [{**row, "case": row["method"], "task": task} for row, task in zip(rows, tasks, strict=True)]
    front = ["yes" if row["front"] else None for row in with_front(alike)]
    return _paired(rows, "of the pages", {"front": front})


def held_out_runs(result: Result) -> str:
    header = ("commit", "set", "documents, 100 needles each", "tuned on them", "arguments")
    rows = [
        [run["commit"], run["set"], run["documents"], run["tuned"], f"`{run['arguments']}`"]
        for run in result["runs"]
    ]
    return markdown(header, rows)


def equal_time(result: Result) -> str:
    """What a time of selection and attention buys, the shortest first; answers where they were asked."""
    header = (
        "method", "density", "ms", "ms, chunks of 16,384", "KL", "exact", "lost, won; p over questions",
        "logp − dense's ± over questions",
    )  # fmt: skip
    cells = [
        [
            f"`{row['method']}`",
            f"{row['density']:.3f}",
            f"{row['ms']:.0f}",
            f"{row['ms_16384']:.0f}",
            f"{row['kl']:.3f} ± {row['kl_error']:.3f}",
            *(
                (
                    f"{row['exact']} of {row['questions']}",
                    f"{row['lost']}, {row['won']}; {row['p']:.2g}",
                    f"{row['logp_difference']:+.3f} ± {row['logp_error']:.3f}",
                )
                if "exact" in row
                else (None, None, None)
            ),
        ]
        for row in result["rows"]
    ]
    return markdown(header, cells) + provenance(result, "")


def _paired(
    rows: Sequence[Result], density: str, more: Mapping[str, Sequence[str | None]] = MappingProxyType({})
) -> str:
    """more: columns behind the others, a cell for each row."""
    header = (
        "case", "method", "tokens", "documents", density, "ms", "KL", "exact", _OVER_DOCUMENTS,
        "lost, won; p over questions", "logp − dense's ± over questions", "commit", *more,
    )  # fmt: skip
    cells = [
        [
            row["case"],
            f"`{row['method']}`",
            row["tokens"],
            f"{row['documents']}, {row['set']}",
            f"{row['density']:.3f}",
            f"{row['ms']:.0f}" if "ms" in row else None,
            f"{row['kl']:.3f}" if "kl" in row else None,
            f"{row['exact']} of {row['questions']}",
            kept(row),
            f"{row['lost']}, {row['won']}; {row['p']:.2g}" if "p" in row else None,
            f"{row['logp_difference']:+.3f}" + (f" ± {row['logp_error']:.3f}" if "logp_error" in row else ""),
            row["commit"],
            *(column[at] for column in more.values()),
        ]
        for at, row in enumerate(rows)
    ]
    return markdown(header, cells)


def served(result: Result) -> str:
    """Answers through gRPC; lost and won against the first row."""
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
