"""Runs one client's cases, in the clients' own environment, and prints a line of JSON for each."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

BASE, MODEL = sys.argv[1:3] if len(sys.argv) > 2 else ("", "")
"""The service's address, and its model."""
QUESTION = "How is the weather in Rome?"
MARK = "row: "
"""The prefix of each line, because some clients print, too."""
CASES: list[tuple[str, Callable[[], object]]] = []


def weather(city: str, days: int) -> str:
    """Tell the weather of a city for some days."""
    return f"sun in {city} for {days} days"


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ARGUMENTS = {"city": "Rome", "days": 3}
ANSWER = "Sunny in Rome."


def case(run: Callable[[], object]) -> Callable[[], object]:
    """Add a case. A case returns None if the client works, or the message of a refusal."""
    CASES.append((run.__name__, run))
    return run


def refusal(call: Callable[[], object], words: str) -> str:
    """Return the message of an error, which must contain these words."""
    try:
        call()
    except Exception as error:
        assert words in str(error), error
        return f"refused: {words}"
    raise AssertionError("it was not refused")


def main() -> None:
    for name, run in CASES:
        try:
            outcome = run() or "works"
        except Exception:
            outcome = "fails: " + traceback.format_exc()
        print(MARK + json.dumps([name, outcome]), flush=True)
