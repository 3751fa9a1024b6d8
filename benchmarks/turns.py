"""`python -m deltafront.benchmarks.turns --old DIR`: is this checkout slower than the one in DIR?

Times cases of the kernel benchmark of both on one GPU in turns (old, new, old, new, ...), each checkout in a
process of its own that is kept alive (`turns_worker.py`), so that what the card does over minutes (heat,
power, clocks) meets both. Before a case's turns both have checked and prepared it and taken one turn that is
not counted: a rested card is faster. Prints for each case the medians over the turns, and the ratio new / old
of two turns that follow one another: its median, least and most. Exits with 1 if a median ratio is above
--limit.

About three minutes on an H200. Needs nothing of DIR but `benchmarks/harness.py` and `cases_*.py` as they are
since commit d887ebd.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "dense": "cases_executors",
    "block_sparse_0.085": "cases_executors",
    "delta_kv_50": "cases_executors",
    "dense_d64": "cases_executors",
    "block_sparse_0.085_d64": "cases_executors",
    "dpxa_selection": "cases_selection",
    "paged_decode": "cases_decode",
    "paged_decode_64_pages": "cases_decode",
}
"""Cases and the modules they are from."""


class Checkout:
    """A worker process with one checkout as its `deltafront`."""

    def __init__(self, name: str, root: Path, link: Path, tokens: int, modules: Sequence[str]) -> None:
        self.name = name
        link.mkdir()
        (link / "deltafront").symlink_to(root, target_is_directory=True)
        path = [str(link), *filter(None, [os.environ.get("PYTHONPATH")])]
        script = Path(__file__).with_name("turns_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(tokens), *modules],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do: str, **more: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """To what was asked, or the greeting. Raises RuntimeError if it failed or the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the {self.name} checkout has ended: {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"in the {self.name} checkout:\n{answer['error']}")
        return answer

    def time(self, budget_ms: float) -> float:
        self.ask("time", budget_ms=budget_ms)
        return float(self.answer()["ms"])

    def __enter__(self) -> Checkout:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@dataclass(frozen=True)
class Turns:
    """The times of one case, ms: one of each checkout a round."""

    case: str
    old: list[float]
    new: list[float]

    @property
    def ratios(self) -> list[float]:
        return [new / old for old, new in zip(self.old, self.new, strict=True)]

    def __str__(self) -> str:
        ratios = self.ratios
        return (
            f"{self.case:28s} old {median(self.old):10.4f} ms  new {median(self.new):10.4f} ms  "
            f"ratio {median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})"
        )


def together(checkouts: Sequence[Checkout], do: str, **more: object) -> None:
    """Ask all, then wait for all: what is not timed may run side by side."""
    for checkout in checkouts:
        checkout.ask(do, **more)
    for checkout in checkouts:
        checkout.answer()


def take_turns(old: Checkout, new: Checkout, case: str, rounds: int, budget_ms: float) -> Turns:
    """Check, prepare, one turn each that does not count, then `rounds` turns each."""
    print(f"{case}: checking", file=sys.stderr, flush=True)
    together((old, new), "check", case=case)
    print(f"{case}: preparing, then {rounds} rounds", file=sys.stderr, flush=True)
    together((old, new), "prepare", case=case)
    times: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        times.append((old.time(budget_ms), new.time(budget_ms)))
    together((old, new), "drop")
    return Turns(case, [a for a, _ in times[1:]], [b for _, b in times[1:]])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--old", type=Path, required=True, help="another checkout (or export) of the repository"
    )
    parser.add_argument("--new", type=Path, default=ROOT, help="this checkout by default")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES, help="all by default")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget-ms", type=float, default=400.0, help="of runs in a turn, at least 3 runs")
    parser.add_argument("--limit", type=float, default=1.01, help="the largest median ratio that passes")
    args = parser.parse_args(arguments)
    modules = sorted({CASES[case] for case in args.only})
    with tempfile.TemporaryDirectory() as links:
        made = (args.tokens, modules)
        with (
            Checkout("old", args.old.resolve(), Path(links) / "old", *made) as old,
            Checkout("new", args.new.resolve(), Path(links) / "new", *made) as new,
        ):
            for checkout, root in ((old, args.old), (new, args.new)):
                greeting = checkout.answer()
                print(f"{checkout.name}: {greeting['root']} on {greeting['device']}", flush=True)
                if greeting["root"] != str(root.resolve()):
                    parser.error(f"the {checkout.name} process has imported {greeting['root']}, not {root}")
            slower = []
            for case in args.only:
                turns = take_turns(old, new, case, args.rounds, args.budget_ms)
                print(turns, flush=True)
                if median(turns.ratios) > args.limit:
                    slower.append(case)
    print(f"slower by more than {args.limit - 1:.1%}: {', '.join(slower) or 'none'}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
