"""Merges the results of N processes (--shard I/N) into the result of a single process.

    python -m deltafront.benchmarks.accuracy.merge A.json B.json … --result FILE \
        --gate 'dpxa recompute 8:exact>=0.985'

Give the files of all N shards, in any order. The script prints the table, writes --result as JSON, and exits
with 1 if a --gate is missed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deltafront.benchmarks.accuracy.report import (
    BASELINE,
    Gate,
    Outcome,
    apart,
    missed,
    parse_gate,
    rows,
    table,
    together,
    together_table,
)
from deltafront.benchmarks.arguments import parser_of, told
from deltafront.benchmarks.harness import write_json

Origin = Mapping[str, Any]
"""Hardware, commit and dtype of a result."""


def conclude(
    outcomes: Sequence[Outcome],
    origin: Origin,
    gates: Sequence[Gate],
    result: Path | None,
    compare: Path | None = None,
) -> int:
    """Make the result rows of all outcomes, print them as a table and write them to the file `result`. Return
    1 if a gate is missed or a row differs from the results file `compare`."""
    found = rows(outcomes, BASELINE)
    print(table(found))
    pooled = together(found)
    if pooled:
        print(f"\n{together_table(pooled)}")
    if result:
        write_json(result, {**origin, "rows": found, **({"together": pooled} if pooled else {})})
    reasons = [f"gate missed: {reason}" for reason in missed(gates, found)]
    if compare:
        far = apart(found, json.loads(compare.read_text())["rows"])
        reasons += [f"not as in {compare.name}: {reason}" for reason in far]
        print(f"\n{len(found)} rows compared with {compare}: {len(far) or 'none'} apart")
    for reason in reasons:
        print(reason, file=sys.stderr)
    return 1 if reasons else 0


def append_outcomes(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Append all outcomes of a document in one write, so that an interrupted run leaves no part of one."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{json.dumps(asdict(outcome))}\n" for outcome in outcomes))


def read_outcomes(path: Path) -> list[Outcome]:
    return [_outcome(json.loads(given)) for given in path.read_text(encoding="utf-8").splitlines()]


def write_shard(outcomes: Sequence[Outcome], shard: tuple[int, int], origin: Origin, result: Path) -> None:
    """Write the outcomes of one process. shard: The process's index and the number of processes."""
    write_json(result, {**origin, "shard": shard, "outcomes": [asdict(outcome) for outcome in outcomes]})


def merged(paths: Sequence[Path]) -> tuple[list[Outcome], Origin]:
    """Return the outcomes of all shards, in the order of a single process. Raises ValueError if the files are
    not exactly the shards of one run."""
    shards = [json.loads(path.read_text()) for path in paths]
    if sorted(one["shard"] for one in shards) != [[i, len(shards)] for i in range(len(shards))]:
        raise ValueError(f"not each shard once: {[one['shard'] for one in shards]}")
    shards.sort(key=lambda one: one["shard"])
    origins = [{key: one[key] for key in one if key not in ("shard", "outcomes")} for one in shards]
    if any(origin != origins[0] for origin in origins):
        raise ValueError(f"shards of different runs: {origins}")
    outcomes = [_outcome(given) for one in shards for given in one["outcomes"]]
    # The first shard has a document of every length and task, in order. Stable sorting keeps this order.
    return sorted(outcomes, key=_index), origins[0]


def _outcome(given: Mapping[str, Any]) -> Outcome:
    answers = {about: (logp, exact) for about, (logp, exact) in given["answers"].items()}
    return Outcome(**{**given, "answers": answers})


def _index(outcome: Outcome) -> int:
    """Return a document's index among documents of the same length and task, from the end of its name."""
    return int(outcome.document.rpartition("-")[2])


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("shards", type=Path, nargs="+", metavar="FILE", help="--result of each process")
    parser.add_argument(
        "--gate", type=told(parse_gate), nargs="+", default=[], metavar="METHOD:FIGURE>=NUMBER,…"
    )
    parser.add_argument("--result", type=Path)
    arguments = parser.parse_args()
    return conclude(*merged(arguments.shards), arguments.gate, arguments.result)


if __name__ == "__main__":
    sys.exit(main())
