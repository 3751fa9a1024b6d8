"""Makes Markdown tables, and the line below a table that says how its numbers were measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]
"""The content of a file in benchmarks/results/."""


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def source(result: Result) -> str:
    """Return the hardware, commit and versions of a measurement."""
    parts = [str(result[key]) for key in ("gpu", "hardware", "machine") if result.get(key)]
    parts += [f"{key} {result[key]}" for key in ("commit", "torch", "triton") if result.get(key)]
    return ", ".join(parts)


def provenance(result: Result, what: str = "; medians") -> str:
    text = f" Text: {result['text']}." if result.get("text") else ""
    note = f" {result['note'][0].upper()}{result['note'][1:]}." if result.get("note") else ""
    return f"\n\n{source(result)}{what}.{text}{note}"
