"""Writes benchmarks/results/chaos.json: a row for each case, which runs may add to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from deltafront.benchmarks.harness import commit_of, write_json

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "chaos.json"


@dataclass(frozen=True)
class Row:
    """A case's result. bad: number of tries that failed."""

    case: str
    tries: int
    bad: int
    note: str = ""


def merged(rows: Sequence[Row], row: Row, add: bool) -> list[Row]:
    """Replace the row of a case. add: instead add the numbers to the old row, and join the notes."""
    old = next((one for one in rows if one.case == row.case), None)
    if old is None:
        return [*rows, row]
    if add:
        notes = "; ".join(dict.fromkeys(note for note in (old.note, row.note) if note))
        row = Row(row.case, old.tries + row.tries, old.bad + row.bad, notes)
    return [row if one.case == row.case else one for one in rows]


def write(row: Row, add: bool, path: Path = RESULT) -> None:
    """Write a row into the file. Rows of other cases stay, and name their commit if it differs."""
    commit = commit_of(ROOT)
    content = json.loads(path.read_text()) if path.exists() else {"commit": commit, "rows": []}
    rows = [Row(**one) for one in content["rows"]]
    if content["commit"] != commit:
        rows = [_of(one, content["commit"]) for one in rows]
    write_json(path, {"commit": commit, "rows": [asdict(one) for one in merged(rows, row, add)]})


def _of(row: Row, commit: str) -> Row:
    known = "commit" in row.note
    return row if known else replace(row, note="; ".join(filter(None, (row.note, f"commit {commit}"))))
