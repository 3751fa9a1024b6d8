"""Who calls, what each may have at once, and what each has: the same for every edge.

A door counts its own requests exactly. What its callers have at other doors, and in sessions, it knows from
the workers, whom it asks afresh before it refuses anything for that, and again once a request has its pages:
of two that came to two doors at the same moment one at least sees the other then. Of a worker that does not
answer in time what it said last is counted; one that this door has not found yet (`door.refresh_s`) is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ...workers.messages.states import OwnerUse
from ..errors import Overloaded

RETRY_S = 1.0
"""When requests may have ended, a caller's own or any: nobody knows."""
_OTHERS_GIVE_WAY_S = (0.0, 0.05, 0.1, 0.2)
"""Pauses before each look, while doors that have to give back pages may be at it."""


@dataclass(frozen=True)
class Allowance:
    """requests: prompts and answers at once. tokens: of K/V held at once, by these and by sessions; a request
    counts with its prompt and the longest answer it asked for. None: no limit."""

    requests: int | None = None
    tokens: int | None = None

    def holds(self, requests: int, tokens: int) -> bool:
        few = self.requests is None or requests <= self.requests
        return few and (self.tokens is None or tokens <= self.tokens)


@dataclass(frozen=True)
class Caller:
    """owner: a digest of the token, whose sessions these are. name: for logs."""

    owner: str
    name: str
    allowance: Allowance = field(default_factory=Allowance)


@dataclass(eq=False)
class Share:
    """What one request counts with."""

    caller: Caller
    _callers: Callers
    tokens: int = 0

    async def take(self, tokens: int) -> None:
        """Count with so many tokens from now on, instead of those before. Raises Overloaded."""
        owner, callers, limit = self.caller.owner, self._callers, self.caller.allowance.tokens
        if limit is not None:
            if tokens > limit:
                raise Overloaded(f"{tokens} tokens are more than this token may hold at all, {limit}")
            wanted = tokens - self.tokens
            if callers.tokens_here(owner) + wanted <= limit < callers.tokens(owner) + wanted:
                await callers.ask()
            held = callers.tokens(owner) - self.tokens
            if held + tokens > limit:
                raise _holds_too_many(held, limit, tokens)
        self.tokens = tokens

    def refusal(self) -> Overloaded:
        """Why it was not confirmed."""
        owner, callers, allowance = self.caller.owner, self._callers, self.caller.allowance
        requests = allowance.requests
        if requests is not None and (allowance.tokens is None or callers.requests(owner) > requests):
            return _has_too_many(requests)
        assert allowance.tokens is not None, "no limit, no refusal"
        return _holds_too_many(callers.tokens(owner) - self.tokens, allowance.tokens, self.tokens)

    async def confirmed(self) -> bool:
        """Whether the caller has no more than it may, now that workers know of this request. Where doors let
        in too much at the same moment, the one whose name comes first waits for the others to give way."""
        owner, callers, allowance = self.caller.owner, self._callers, self.caller.allowance
        if allowance == Allowance():
            return True
        for pause in _OTHERS_GIVE_WAY_S:
            await asyncio.sleep(pause)
            await callers.ask()
            if allowance.holds(callers.requests(owner), callers.tokens(owner)):
                return True
            if not callers.comes_first(owner):
                return False
        return False


class Callers:
    """Every caller's account. door: this one's name. used: what the workers said last. ask: has them say it
    again. most: requests of all callers that this door works on at once; None: no limit."""

    def __init__(
        self,
        door: str,
        used: Callable[[], Iterable[OwnerUse]],
        ask: Callable[[], Awaitable[None]],
        most: int | None = None,
    ) -> None:
        self._door = door
        self._used = used
        self.ask = ask
        self._most = most
        self._here: set[Share] = set()

    @asynccontextmanager
    async def request(self, caller: Caller) -> AsyncIterator[Share]:
        """A request of the caller's, while the block runs. Raises Overloaded."""
        limit = caller.allowance.requests
        if limit is not None:
            if self.requests_here(caller.owner) < limit <= self.requests(caller.owner):
                await self.ask()
            if self.requests(caller.owner) >= limit:
                raise _has_too_many(limit)
        if self._most is not None and len(self._here) >= self._most:
            message = f"this server works on {self._most} requests, as many as it may: try again"
            raise Overloaded(message, retry_after_s=RETRY_S)
        share = Share(caller, self)
        self._here.add(share)
        try:
            yield share
        finally:
            self._here.discard(share)

    def requests_here(self, owner: str) -> int:
        """At this door."""
        return sum(share.caller.owner == owner for share in self._here)

    def requests(self, owner: str) -> int:
        return self.requests_here(owner) + sum(use.requests for use in self._elsewhere(owner))

    def tokens_here(self, owner: str) -> int:
        """At this door."""
        return sum(share.tokens for share in self._here if share.caller.owner == owner)

    def tokens(self, owner: str) -> int:
        return self.tokens_here(owner) + sum(use.tokens for use in self._elsewhere(owner))

    def comes_first(self, owner: str) -> bool:
        """Whether this door's name comes before those of all others through which the owner has anything."""
        return all(self._door < use.door for use in self._elsewhere(owner) if use.door)

    def _elsewhere(self, owner: str) -> Iterator[OwnerUse]:
        return (use for use in self._used() if use.owner == owner and use.door != self._door)


def _has_too_many(limit: int) -> Overloaded:
    return Overloaded(f"this token has {limit} requests running, as many as it may", retry_after_s=RETRY_S)


def _holds_too_many(held: int, limit: int, tokens: int) -> Overloaded:
    message = f"this token holds {held} tokens and may hold {limit}: {tokens} more do not fit"
    return Overloaded(message, retry_after_s=RETRY_S)
