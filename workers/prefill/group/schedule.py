"""Chooses the request whose chunk a prefill group runs next: shortest remaining first, with ageing. Pure.

A prompt of 256 tokens overtakes a prompt of 512K tokens between two chunks. While none of its chunks runs, a
request earns `ageing` tokens of credit a second (`ageing_of`), and credit counts as if the prompt were that
much shorter. A chunk of t tokens costs 2t of credit. Since `remaining` falls by t as well, the rank worsens
by t, and the request earns that back in t / ageing seconds. A long prompt that others overtake thus advances
at about `ageing` tokens a second.

A prompt that needs more pages than are free blocks later prompts, except those that already have pages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deltafront.workers.messages.service_tiers import ServiceTier

AGEING = 256.0
"""Tokens of credit that a waiting request earns each second, at most."""
_AGEING_SHARE = 1 / 16
"""The same as a share of the tokens that the group prefills each second. With more, a slow group would let
equal prompts take turns, and all would end late."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The scheduler's view of a waiting or running request.

    Attributes:
        remaining: Number of tokens whose chunks have not been sent.
        credit: Tokens of credit.
        idle_since: The time since which none of its chunks runs; None while one runs.
        pages: Number of pages that it needs before its first chunk.
        opened: True if its first chunk has been sent.
    """

    request_id: str
    remaining: int
    arrived: float
    idle_since: float | None
    credit: float = 0.0
    pages: int = 0
    opened: bool = False
    tier: ServiceTier = ServiceTier.DEFAULT


def ageing_of(rate: float) -> float:
    """Return the credit per second of a group that prefills `rate` tokens a second; 0: not known."""
    return min(AGEING, _AGEING_SHARE * rate) if rate > 0 else AGEING


def arrival(
    request_id: str, tokens: int, now: float, pages: int = 0, tier: ServiceTier = ServiceTier.DEFAULT
) -> Waiting:
    return Waiting(
        request_id=request_id, remaining=tokens, arrived=now, idle_since=now, pages=pages, tier=tier
    )


def credit_at(waiting: Waiting, now: float, ageing: float) -> float:
    idle = 0.0 if waiting.idle_since is None else max(0.0, now - waiting.idle_since)
    return waiting.credit + ageing * idle


def next_request(waiting: Iterable[Waiting], now: float, ageing: float, free: int) -> str | None:
    """Choose the request with the smallest `remaining - credit`. Ties go to the earlier arrival, then to the
    smaller id.

    Args:
        free: Number of free pages.
    Returns:
        The request's id; None if no request can run.
    """

    def rank(entry: Waiting) -> tuple[float, float, str]:
        return entry.remaining - credit_at(entry, now, ageing), entry.arrived, entry.request_id

    entries = list(waiting)
    running = min((entry for entry in entries if entry.opened), key=rank, default=None)
    opening = min((entry for entry in entries if not entry.opened), key=rank, default=None)
    if opening is None or opening.pages > free:
        return None if running is None else running.request_id
    return opening.request_id if running is None else min(running, opening, key=rank).request_id


def next_of_tiers(
    waiting: Iterable[Waiting], order: Sequence[ServiceTier], now: float, ageing: float, free: int
) -> str | None:
    """Choose by `next_request` within the first tier of `order` that has a request that can run.

    If the first tier can run nothing because its next request needs more pages than are free, later tiers may
    only continue what they began. So pages become free for it.
    """
    entries = list(waiting)
    for tier in order:
        mine = [entry for entry in entries if entry.tier is tier]
        chosen = next_request(mine, now, ageing, free)
        if chosen is not None:
            return chosen
        free = 0
    return None


def chunk_sent(waiting: Waiting, tokens: int, now: float, ageing: float) -> Waiting:
    credit = max(0.0, credit_at(waiting, now, ageing) - 2 * tokens)
    remaining = waiting.remaining - tokens
    return replace(waiting, remaining=remaining, credit=credit, idle_since=None, opened=True)


def became_idle(waiting: Waiting, now: float) -> Waiting:
    return replace(waiting, idle_since=now)
