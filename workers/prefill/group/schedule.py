"""Which request's chunk enters a prefill group next: shortest remaining first, with ageing. Pure.

A request is short by what is left of it, so a 256-token question overtakes a 512K document between two
chunks. Ageing keeps the document alive under a steady stream of short ones: while nothing of it runs, it
earns `ageing` tokens of credit a second, and counts as that much shorter. A chunk that it then gets costs
twice its tokens in credit, so it falls back by one chunk each time: a request that has once aged to the
front continues at about `ageing` tokens a second instead of blocking everybody until it is finished.

A request takes its pages with its first chunk. Those that still need them take them in the same order, and
none passes another: what is too big for the pages that are free now keeps the requests behind it waiting
until they are, while those that have their pages go on. All that wait age alike, so a later request passes
an earlier one only by being shorter than what is left of that one's ageing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Waiting:
    """A request with chunks left to send. remaining, credit: tokens. Times in seconds of one clock.

    idle_since: since when no chunk of it has been running (None: one is, so it is not ageing). pages: how
    many it takes with its first chunk, or took when it was opened.
    """

    request_id: str
    remaining: int
    arrived: float
    idle_since: float | None
    credit: float = 0.0
    pages: int = 0
    opened: bool = False


def arrival(request_id: str, tokens: int, now: float, pages: int = 0) -> Waiting:
    return Waiting(request_id, tokens, now, now, pages=pages)


def credit_at(waiting: Waiting, now: float, ageing: float) -> float:
    """Tokens by which the request counts as shorter at `now`."""
    idle = 0.0 if waiting.idle_since is None else max(0.0, now - waiting.idle_since)
    return waiting.credit + ageing * idle


def next_request(waiting: Iterable[Waiting], now: float, ageing: float, free: int) -> str | None:
    """The id with the fewest remaining tokens less credit among those that may run; ties go to whoever came
    first, then by id. None when nobody may.

    ageing: tokens of credit per second. free: pages that are nobody's.
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
    """The request after `tokens` of it were sent: open, shorter, poorer by twice the chunk, and not idle."""
    credit = max(0.0, credit_at(waiting, now, ageing) - 2 * tokens)
    remaining = waiting.remaining - tokens
    return replace(waiting, remaining=remaining, credit=credit, idle_since=None, opened=True)


def became_idle(waiting: Waiting, now: float) -> Waiting:
    """The request after the last of its running chunks ended."""
    return replace(waiting, idle_since=now)
