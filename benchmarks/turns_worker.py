"""Times cases of whichever checkout is `deltafront` on PYTHONPATH, as `turns.py` asks for them.

Run as a script: `turns_worker.py TOKENS MODULE...`, MODULE a `cases_*` of `deltafront.benchmarks`. It imports
nothing of its own checkout, and of the other only `harness` and the case modules: older ones will do.

First it says {"root": ..., "device": ...}. Then it reads a JSON object a line, {"do": "check" | "prepare" |
"time" | "drop", "case": NAME}, "time" with "budget_ms", and answers each with one: {"ms": ...}, {} or
{"error": ...}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


class Worker:
    """The cases at one number of tokens, at most one of them prepared."""

    def __init__(self, tokens: int, modules: list[str]) -> None:
        self.harness = import_module("deltafront.benchmarks.harness")
        config = self.harness.BenchConfig(device=torch.device("cuda"), tokens=tokens)
        found = [import_module(f"deltafront.benchmarks.{name}").cases(config) for name in modules]
        self.cases = {case.name: case for cases in found for case in cases if case.tokens == tokens}
        self.checked: set[int] = set()
        self.run: Any = None

    def check(self, name: str) -> None:
        """As `harness.run_cases`: a check that several cases share runs once."""
        check = self.cases[name].check
        if check is not None and id(check) not in self.checked:
            check()
            self.checked.add(id(check))
            torch.cuda.empty_cache()

    def prepare(self, name: str) -> None:
        self.run = self.cases[name].prepare().run

    def time(self, budget_ms: float) -> float:
        return float(self.harness.median_ms(self.run, budget_ms=budget_ms, at_least=3))

    def drop(self) -> None:
        self.run = None
        torch.cuda.empty_cache()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "check":
                self.check(request["case"])
            case "prepare":
                self.prepare(request["case"])
            case "time":
                return {"ms": self.time(request["budget_ms"])}
            case "drop":
                self.drop()
            case other:
                raise ValueError(f"asked to {other!r}")
        return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anything else prints goes to stderr
    worker = Worker(int(sys.argv[1]), sys.argv[2:])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    root = str(Path(str(import_module("deltafront").__file__)).resolve().parent)
    print(json.dumps({"root": root, "device": device}), file=answers)
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
