"""Callers and their quotas. Limits per minute are in `rates`.

If a caller has a quota, a door asks the workers how much the caller uses through other doors. Two doors that
receive requests at the same moment do not see each other's requests, so a caller may briefly use twice its
quota.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from deltafront.service.errors import InvalidArgument, Overloaded
from deltafront.service.request.rates import RateLimits, RateState, Unit
from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.messages.states import OwnerUse

ANYONE = ""
"""The owner of all requests if no tokens are configured."""
OTHERS = "others"
"""The label in metrics of all callers without a name in the token file."""
RETRY_S = 1.0
"""The retry time for a caller over its quota. It is a guess, because the end of running requests is unknown.
"""


def fits_share(owner: str, mine: int, everyone: int, most: int) -> bool:
    """Return whether an owner may hold `mine` units (requests, bytes) when all owners together hold
    `everyone` units of the limit `most`.

    An owner may hold at most the amount that then stays free: the first owner half of the limit, the next
    owner half of the rest. So a new owner always finds room. Without authentication all callers are one
    owner, who may hold everything.
    """
    return everyone <= most and (owner == ANYONE or mine <= most - everyone)


@dataclass(frozen=True)
class Quota:
    """A caller's limits: at one time, and per minute. None means no limit.

    Args:
        tokens: Tokens of KV cache, including sessions. A request counts its prompt and its longest answer.
        tokens_per_minute: Prompt tokens that are prefilled, and answered tokens.
    """

    requests: int | None = None
    tokens: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    @property
    def per_minute(self) -> Iterator[tuple[Unit, int]]:
        if self.requests_per_minute is not None:
            yield "requests", self.requests_per_minute
        if self.tokens_per_minute is not None:
            yield "tokens", self.tokens_per_minute


@dataclass(frozen=True)
class Caller:
    """An authenticated caller.

    Args:
        owner: A digest of its bearer token.
        name: For logs.
        label: For metrics.
        best: The best service tier that it may ask for.
    """

    owner: str
    name: str
    quota: Quota = field(default_factory=Quota)
    label: str = OTHERS
    best: ServiceTier = ServiceTier.DEFAULT

    def tier(self, asked: ServiceTier | None) -> ServiceTier:
        """Return a request's service tier: by default `default`, or the caller's best below that. Raises
        InvalidArgument for a better one than the caller's best."""
        tier = asked or max(ServiceTier.DEFAULT, self.best, key=lambda one: one.rank)
        if tier.rank < self.best.rank:
            better = f"{tier} is better than this token may ask for: ask for {self.best} or less"
            raise InvalidArgument("service_tier", better)
        return tier


@dataclass(eq=False)
class RequestUse:
    """A request's use of its caller's quota, counted from its acceptance. requests: 1, or 0 if it does not
    count.
    """

    caller: Caller
    _callers: Callers
    tokens: int = 0
    requests: int = 1
    running: bool = False

    def run(self) -> None:
        """Count the request as running, once its message has arrived. Raises Overloaded if the door is
        full.
        """
        self._callers.check_running()
        self._callers.count(self)
        self.running = True

    def __enter__(self) -> RequestUse:
        return self

    def __exit__(self, *_error: object) -> None:
        self._callers.end(self)

    @property
    def rates(self) -> tuple[RateState, ...]:
        return self._callers.rates.states(self.caller)

    def spend(self, tokens: int) -> None:
        """Count tokens against the caller's limit per minute."""
        self._callers.rates.spend(self.caller, tokens)

    async def set_tokens(self, tokens: int) -> None:
        """Count the request's KV cache, in tokens. Raises Overloaded if its caller may not hold that many."""
        owner, callers, limit = self.caller.owner, self._callers, self.caller.quota.tokens
        if limit is not None:
            if tokens > limit:
                raise Overloaded(
                    f"{tokens} tokens are more than this caller may ever hold in the KV cache, {limit}"
                )
            if callers.tokens(owner, elsewhere=False) - self.tokens + tokens <= limit:
                await callers.ask_workers()
            held = callers.tokens(owner) - self.tokens
            if held + tokens > limit:
                message = f"this token holds {held} tokens and may hold {limit}: {tokens} more do not fit"
                raise Overloaded(message, retry_after_s=RETRY_S)
        self.tokens = tokens


@dataclass(eq=False)
class Callers:
    """Counts each caller's use, and enforces its quota.

    Args:
        worker_uses: Returns the uses that workers last reported.
        ask_workers: Makes the workers report again.
        max_requests: Maximum number of running requests. Twice as many may be arriving.
    """

    door: str
    worker_uses: Callable[[], Iterable[OwnerUse]]
    ask_workers: Callable[[], Awaitable[None]]
    max_requests: int | None = None
    rates: RateLimits = field(default_factory=RateLimits)
    _accepted: set[RequestUse] = field(default_factory=set, init=False)

    async def request(self, caller: Caller) -> RequestUse:
        """Count a request during the `with` block, which begins before its message is received. Raises
        Overloaded. A refused request counts only against the caller's requests per minute."""
        self.rates.begin(caller)
        limit = caller.quota.requests
        if limit is not None:
            if self.requests(caller.owner, elsewhere=False) < limit:
                await self.ask_workers()
            if self.requests(caller.owner) >= limit:
                message = f"this token has {limit} requests running, as many as it may"
                raise Overloaded(message, retry_after_s=RETRY_S)
        self._check_arriving(caller.owner)
        use = RequestUse(caller, self)
        self._accepted.add(use)
        return use

    def end(self, use: RequestUse) -> None:
        self._accepted.discard(use)

    def part(self, caller: Caller) -> RequestUse:
        """Return the quota use of one choice of a request with several. Its tokens count, but it is not
        counted as a further request."""
        return RequestUse(caller, self, requests=0)

    def count(self, use: RequestUse) -> None:
        self._accepted.add(use)

    def uncounted(self, caller: Caller) -> RequestUse:
        return RequestUse(caller, self, requests=0)

    def _check_arriving(self, owner: str) -> None:
        if self.max_requests is None:
            return
        arriving = [use.caller.owner for use in self._accepted if not use.running]
        if not fits_share(owner, arriving.count(owner) + 1, len(arriving) + 1, 2 * self.max_requests):
            message = "this server receives as many requests as it can: try again"
            raise Overloaded(message, retry_after_s=RETRY_S)

    def check_running(self) -> None:
        """Check that one more request may run. Raises Overloaded."""
        if self.max_requests is None or sum(use.running for use in self._accepted) < self.max_requests:
            return
        message = f"this server works on {self.max_requests} requests, as many as it may: try again"
        raise Overloaded(message, retry_after_s=RETRY_S)

    def requests(self, owner: str, *, elsewhere: bool = True) -> int:
        return sum(use.requests for use in self._uses(owner, elsewhere))

    def tokens(self, owner: str, *, elsewhere: bool = True) -> int:
        return sum(use.tokens for use in self._uses(owner, elsewhere))

    def _uses(self, owner: str, elsewhere: bool) -> Iterator[RequestUse | OwnerUse]:
        yield from (use for use in self._accepted if use.caller.owner == owner)
        if elsewhere:
            yield from (use for use in self.worker_uses() if use.owner == owner and use.door != self.door)
