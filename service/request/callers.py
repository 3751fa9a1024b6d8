"""Who calls, what each may have at once, and what each has: the same for every edge.

A door counts its own requests exactly. What its callers have at other doors, and in sessions, it knows from
the workers' last report: up to `door.refresh_s` late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...workers.messages.states import OwnerUse
from ..errors import Overloaded

_RETRY_S = 1.0
"""When a caller's own requests may have ended: nobody knows."""


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

    def take(self, tokens: int) -> None:
        """Count with so many tokens from now on, instead of those before. Raises Overloaded."""
        limit = self.caller.allowance.tokens
        if limit is not None:
            others = self._callers.tokens(self.caller.owner) - self.tokens
            if tokens > limit:
                raise Overloaded(f"{tokens} tokens are more than this token may hold at all, {limit}")
            if others + tokens > limit:
                message = f"this token holds {others} tokens and may hold {limit}: {tokens} more do not fit"
                raise Overloaded(message, retry_after_s=_RETRY_S)
        self.tokens = tokens


class Callers:
    """Every caller's account. door: this one's name. used: what the workers said last."""

    def __init__(self, door: str, used: Callable[[], Iterable[OwnerUse]]) -> None:
        self._door = door
        self._used = used
        self._here: set[Share] = set()

    @contextmanager
    def request(self, caller: Caller) -> Iterator[Share]:
        """A request of the caller's, while the block runs. Raises Overloaded."""
        limit = caller.allowance.requests
        if limit is not None and self.requests(caller.owner) >= limit:
            message = f"this token has {limit} requests running, as many as it may"
            raise Overloaded(message, retry_after_s=_RETRY_S)
        share = Share(caller, self)
        self._here.add(share)
        try:
            yield share
        finally:
            self._here.discard(share)

    def requests(self, owner: str) -> int:
        here = sum(share.caller.owner == owner for share in self._here)
        return here + sum(use.requests for use in self._elsewhere(owner))

    def tokens(self, owner: str) -> int:
        here = sum(share.tokens for share in self._here if share.caller.owner == owner)
        return here + sum(use.tokens for use in self._elsewhere(owner))

    def _elsewhere(self, owner: str) -> Iterator[OwnerUse]:
        return (use for use in self._used() if use.owner == owner and use.door != self._door)
