"""Which page selections of decode are worth having: those that no other beats. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from deltafront.benchmarks.accuracy.report import Row, figure
from deltafront.benchmarks.markdown import markdown

DECODE = "decode "
"""How the case of a page selection begins: `decode LAYERS:BUDGET`."""

_HEADER = (
    "tokens", "task", "page selection", "share of K/V", "ms", "exact of full's", "logp − full's", "front",
)  # fmt: skip


def with_front(found: Sequence[Row]) -> list[Row]:
    """The rows; those of page selections that answered questions say with `front` whether they are on the
    Pareto front of their length and task: no other takes at most as long a step, has as many exact answers
    and as high a log-probability of the right ones, and is better in one of the three."""
    return [{**row, "front": not _beaten(row, found)} if _selects(row) else row for row in found]


def front_table(found: Sequence[Row]) -> str:
    """Markdown: every length and task's page selections by the share that they read; empty without any."""
    rows = [row for row in with_front(found) if _selects(row)]
    if not rows:
        return ""
    lines = []
    for row in sorted(rows, key=lambda row: (row["tokens"], row["task"], row["ms"])):
        exact = figure(row, "exact")
        cells = (
            row["tokens"],
            row["task"],
            f"`{row['case'].removeprefix(DECODE)}`",
            f"{row['density']:.3f}",
            f"{row['ms']:.1f}",
            f"{row['exact']} of {row['exact_dense']}" + ("" if exact is None else f", {exact:.3f}"),
            f"{row['logp_difference']:+.3f}",
            "yes" if row["front"] else "",
        )
        lines.append(cells)
    return markdown(_HEADER, lines)


def _selects(row: Row) -> bool:
    return row["case"].startswith(DECODE) and "questions" in row


def _beaten(row: Row, found: Sequence[Row]) -> bool:
    mine = _merits(row)
    rivals = [one for one in found if _selects(one) and _same_documents(one, row)]
    return any(
        _merits(one) != mine and all(a >= b for a, b in zip(_merits(one), mine, strict=True))
        for one in rivals
    )


def _same_documents(one: Row, other: Row) -> bool:
    return (one["tokens"], one["task"]) == (other["tokens"], other["task"])


def _merits(row: Row) -> tuple[float, float, float]:
    """More is better."""
    return -row["ms"], row["exact"], row["logp_difference"]
