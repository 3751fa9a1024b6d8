"""Agents' sessions, whose prompts grow turn by turn: read from traces, or generated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deltafront.benchmarks.traffic.plan import BLOCK, Session, Turn

FIRST, LATER = "first_turn", "later_turn"


@dataclass(frozen=True)
class Bounds:
    """Bounds of a session: turns, tokens of a prompt, tokens of an answer, seconds of thinking."""

    turns: int = 14
    tokens: int = 120_000
    answer: int = 256
    think_s: float = 3.0


def read(path: Path, bounds: Bounds) -> list[Session]:
    """Read sessions in the format of github.com/callanjfox/kv-cache-tester.

    Args:
        path: A folder of JSON files with one session each, or a file with one session per line (JSONL).

    Raises:
        ValueError: Something is not a session, or no session's first prompt is within `bounds`.
    """
    found = [_bounded(_turns(where, content), bounds) for where, content in _contents(path)]
    if kept := [session for session in found if session]:
        return kept
    raise ValueError(f"{path}: no session begins with a prompt of at most {bounds.tokens} tokens")


def _contents(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        yield from ((str(file), file.read_text()) for file in sorted(path.glob("*.json")))
        return
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            yield f"{path}:{number}", line


def _turns(where: str, content: str) -> list[Turn]:
    try:
        trace = json.loads(content)
        if trace["block_size"] != BLOCK:
            raise ValueError(f"block_size {trace['block_size']}: only {BLOCK} is read")
        # A subagent's entry nests requests and has no prompt: it is left out.
        asked = [one for one in trace["requests"] if "hash_ids" in one]
        return [_turn(number, one) for number, one in enumerate(asked)]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where} is no session: {error!r}") from error


def _turn(number: int, request: dict[str, Any]) -> Turn:
    """Make a turn. Tokens after its last whole block are in a block that no other turn has."""
    blocks, tokens = [int(block) for block in request["hash_ids"]], int(request["in"])
    rest = max(0, -(-tokens // BLOCK) - len(blocks))
    own = [-1 - (number << 20) - n for n in range(rest)]
    return Turn(
        0,
        [*blocks, *own],
        tokens,
        max(1, int(request["out"])),
        float(request.get("think_time", 0.0)) if number else 0.0,
        LATER if number else FIRST,
    )


def generated(count: int, seed: int, bounds: Bounds) -> list[Session]:
    """Generate sessions of the traces' shape: distributions around the corpus's medians and quartiles.

    A first prompt has 23,000 tokens in the median, a turn adds 640 (the last answer, a tool's output), an
    answer has 214, and thinking takes 10 s.
    """
    random = np.random.default_rng(seed)

    def drawn(median: float, spread: float) -> float:
        return float(random.lognormal(math.log(median), spread))

    def session() -> Iterator[Turn]:
        tokens = max(8_000, int(drawn(23_000, 1.0)))
        for number in range(bounds.turns):
            think_s, part = (drawn(10.0, 1.8), LATER) if number else (0.0, FIRST)
            answer = max(16, int(drawn(214, 1.0)))
            yield Turn(0, range(-(-tokens // BLOCK)), tokens, answer, think_s, part)
            tokens += max(64, int(drawn(640, 1.35)))

    kept: list[Session] = []
    while len(kept) < count:
        one = _bounded(list(session()), bounds)
        kept += [one] if one else []
    return kept


def _bounded(session: Session, bounds: Bounds) -> Session:
    """Cut a session before its first prompt that is too long, and shorten answers and thinking."""
    long = (number for number, turn in enumerate(session) if turn.tokens > bounds.tokens)
    kept: Sequence[Turn] = session[: min(next(long, bounds.turns), bounds.turns)]
    return [
        replace(turn, answer=min(turn.answer, bounds.answer), think_s=min(turn.think_s, bounds.think_s))
        for turn in kept
    ]
