"""Callers and their quotas.

A door asks the workers what a caller with a quota uses elsewhere. Requests that reach two doors at the same
moment do not see each other, so a caller may then get its quota twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ...workers.messages.states import OwnerUse
from ..errors import Overloaded

RETRY_S = 1.0
"""When a caller over its quota should come back: a guess, since nobody knows when requests end."""


@dataclass(frozen=True)
class Quota:
    """Limits of a caller's use at any moment. None is no limit.

    Args:
        tokens: Tokens of K/V, in sessions too. A request counts its prompt and its longest answer.
    """

    requests: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Caller:
    """`owner` is a digest of the token. `name` is for logs."""

    owner: str
    name: str
    quota: Quota = field(default_factory=Quota)


@dataclass(eq=False)
class RequestUse:
    """A running request's part of its caller's quota."""

    caller: Caller
    _callers: Callers
    tokens: int = 0
    requests: int = 1

    async def set_tokens(self, tokens: int) -> None:
        """Count the request's tokens of K/V. Raises Overloaded if its caller may not hold that many."""
        owner, callers, limit = self.caller.owner, self._callers, self.caller.quota.tokens
        if limit is not None:
            if tokens > limit:
                raise Overloaded(f"{tokens} tokens are more than this token may hold at all, {limit}")
            if callers.tokens(owner, elsewhere=False) - self.tokens + tokens <= limit:
                await callers.ask_workers()
            held = callers.tokens(owner) - self.tokens
            if held + tokens > limit:
                message = f"this token holds {held} tokens and may hold {limit}: {tokens} more do not fit"
                raise Overloaded(message, retry_after_s=RETRY_S)
        self.tokens = tokens


@dataclass(eq=False)
class Callers:
    """Counts what every caller uses.

    Args:
        worker_uses: Returns what the workers reported last.
        ask_workers: Makes them report again.
    """

    door: str
    worker_uses: Callable[[], Iterable[OwnerUse]]
    ask_workers: Callable[[], Awaitable[None]]
    max_requests: int | None = None
    _running: set[RequestUse] = field(default_factory=set, init=False)

    @asynccontextmanager
    async def request(self, caller: Caller) -> AsyncIterator[RequestUse]:
        """Count a request while the block runs. Raises Overloaded."""
        limit = caller.quota.requests
        if limit is not None:
            if self.requests(caller.owner, elsewhere=False) < limit:
                await self.ask_workers()
            if self.requests(caller.owner) >= limit:
                message = f"this token has {limit} requests running, as many as it may"
                raise Overloaded(message, retry_after_s=RETRY_S)
        if self.max_requests is not None and len(self._running) >= self.max_requests:
            message = f"this server works on {self.max_requests} requests, as many as it may: try again"
            raise Overloaded(message, retry_after_s=RETRY_S)
        use = RequestUse(caller, self)
        self._running.add(use)
        try:
            yield use
        finally:
            self._running.discard(use)

    def requests(self, owner: str, *, elsewhere: bool = True) -> int:
        return sum(use.requests for use in self._uses(owner, elsewhere))

    def tokens(self, owner: str, *, elsewhere: bool = True) -> int:
        return sum(use.tokens for use in self._uses(owner, elsewhere))

    def _uses(self, owner: str, elsewhere: bool) -> Iterator[RequestUse | OwnerUse]:
        yield from (use for use in self._running if use.caller.owner == owner)
        if elsewhere:
            yield from (use for use in self.worker_uses() if use.owner == owner and use.door != self.door)
