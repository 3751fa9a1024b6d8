"""Chooses the request whose chunk enters a prefill group next: shortest remaining first, with ageing. Pure.

A question of 256 tokens overtakes a document of 512K between two chunks. While no chunk of the document runs,
the document earns `ageing` tokens of credit a second, and counts as that much shorter. A chunk of t tokens
costs 2t of credit: since `remaining` falls by t, too, the document's rank worsens by t. It takes t / ageing
seconds to earn that back, so an aged document proceeds at about `ageing` tokens a second.

A prompt that is too big for the free pages blocks later prompts, except those that already have pages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

AGEING = 256.0
"""Tokens of credit that a waiting request earns each second."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A request with tokens left to prefill, waiting or running.

    Attributes:
        remaining, credit: Tokens.
        idle_since: Time since when none of its chunks runs; None while one does.
        pages: Number of pages that it takes with its first chunk.
        opened: Whether it is running: its first chunk was sent.
    """

    request_id: str
    remaining: int
    arrived: float
    idle_since: float | None
    credit: float = 0.0
    pages: int = 0
    opened: bool = False


def arrival(request_id: str, tokens: int, now: float, pages: int = 0) -> Waiting:
    return Waiting(request_id=request_id, remaining=tokens, arrived=now, idle_since=now, pages=pages)


def credit_at(waiting: Waiting, now: float, ageing: float) -> float:
    idle = 0.0 if waiting.idle_since is None else max(0.0, now - waiting.idle_since)
    return waiting.credit + ageing * idle


def next_request(waiting: Iterable[Waiting], now: float, ageing: float, free: int) -> str | None:
    """Choose the request with the fewest remaining tokens less credit. Earlier arrivals win ties, then ids.

    Args:
        free: Number of free pages.
    Returns:
        Its id; None if no request may run.
    """

    def rank(entry: Waiting) -> tuple[float, float, str]:
        return entry.remaining - credit_at(entry, now, ageing), entry.arrived, entry.request_id

    entries = list(waiting)
    running = min((entry for entry in entries if entry.opened), key=rank, default=None)
    opening = min((entry for entry in entries if not entry.opened), key=rank, default=None)
    if opening is None or opening.pages > free:
        return None if running is None else running.request_id
    return opening.request_id if running is None else min(running, opening, key=rank).request_id


def chunk_sent(waiting: Waiting, tokens: int, now: float, ageing: float) -> Waiting:
    credit = max(0.0, credit_at(waiting, now, ageing) - 2 * tokens)
    remaining = waiting.remaining - tokens
    return replace(waiting, remaining=remaining, credit=credit, idle_since=None, opened=True)


def became_idle(waiting: Waiting, now: float) -> Waiting:
    return replace(waiting, idle_since=now)
