"""benchmarks/results/chaos.json: a row for each case, and how runs add up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deltafront.benchmarks.harness import commit_of

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "chaos.json"


@dataclass(frozen=True)
class Row:
    """bad: of `tries`, those that broke what must hold."""

    case: str
    tries: int
    bad: int
    note: str = ""


def merged(rows: Sequence[Row], row: Row, add: bool) -> list[Row]:
    """With a new row in its case's place. add: tries and bad ones are added to what is there, notes are
    joined."""
    old = next((one for one in rows if one.case == row.case), None)
    if old is None:
        return [*rows, row]
    if add:
        notes = "; ".join(dict.fromkeys(note for note in (old.note, row.note) if note))
        row = Row(row.case, old.tries + row.tries, old.bad + row.bad, notes)
    return [row if one.case == row.case else one for one in rows]


def write(row: Row, add: bool, path: Path = RESULT) -> None:
    """Into the file; what other cases have there stays."""
    content = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = merged([Row(**one) for one in content["rows"]], row, add)
    content = {"commit": commit_of(ROOT), "rows": [asdict(one) for one in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")
