"""Who calls, what each may have at once, and what each has: the same for every edge.

A door counts its own requests exactly. What its callers have at other doors, and in sessions, it knows from
the workers, which it asks afresh for every request of a caller with limits. Requests that come to two doors
at the same moment do not see each other: a caller may then have as much as it is allowed at each of them. A
worker that does not answer in time counts as it last answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ...workers.messages.states import OwnerUse
from ..errors import Overloaded

RETRY_S = 1.0
"""When requests may have ended, a caller's own or any: nobody knows."""


@dataclass(frozen=True)
class Allowance:
    """requests: prompts and answers at once. tokens: of K/V held at once, by these and by sessions; a request
    counts with its prompt and the longest answer it asked for. None: no limit."""

    requests: int | None = None
    tokens: int | None = None


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
            if callers.tokens_here(owner) - self.tokens + tokens <= limit:
                await callers.ask()
            held = callers.tokens(owner) - self.tokens
            if held + tokens > limit:
                message = f"this token holds {held} tokens and may hold {limit}: {tokens} more do not fit"
                raise Overloaded(message, retry_after_s=RETRY_S)
        self.tokens = tokens


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
            if self.requests_here(caller.owner) < limit:
                await self.ask()
            if self.requests(caller.owner) >= limit:
                message = f"this token has {limit} requests running, as many as it may"
                raise Overloaded(message, retry_after_s=RETRY_S)
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

    def _elsewhere(self, owner: str) -> Iterator[OwnerUse]:
        return (use for use in self._used() if use.owner == owner and use.door != self._door)
