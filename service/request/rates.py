"""Limits a caller's requests and tokens per minute, with leaky buckets.

Every door enforces its share: the limit divided by `door.replicas`. So a caller stays below its limit over
all doors, and reaches it if its requests are spread evenly, as HAProxy spreads them.

A bucket drains at the rate of its limit, so an idle caller may use a whole minute's limit at once. A request
counts when it begins. Its tokens count when they are known: tokens to prefill (not cached ones) once pages
are reserved, tokens of the answer one by one. So tokens may exceed the limit, even by one long prompt. Then
further requests are refused until the excess has drained.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from deltafront.service.errors import Overloaded

if TYPE_CHECKING:
    from deltafront.service.request.callers import Caller

Unit = Literal["requests", "tokens"]
_MINUTE_S = 60.0
_ROUNDING = 1e-3
"""A request may lack this part of a unit, so that a client that waits as long as it was told is permitted."""


@dataclass(frozen=True)
class RateState:
    """A limit's state at one door.

    Attributes:
        limit: The caller's limit per minute over all doors.
        remaining: Requests or tokens that this door still permits.
        reset_s: Seconds until the bucket is empty.
    """

    unit: Unit
    limit: int
    remaining: int
    reset_s: float


class RateLimited(Overloaded):
    """The caller is over a limit per minute. `states` are those of all its limits."""

    def __init__(self, message: str, retry_after_s: float, states: tuple[RateState, ...]) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.states = states


@dataclass
class _Use:
    """The units in a caller's bucket at the time `at`."""

    units: float = 0.0
    at: float = 0.0

    def add(self, units: int, now: float, per_s: float) -> None:
        self.units, self.at = self.left(now, per_s) + units, now

    def left(self, now: float, per_s: float) -> float:
        return max(0.0, self.units - (now - self.at) * per_s)


class RateLimits:
    """The rates of a door's callers.

    Args:
        doors: The number of doors that share each limit.
        clock: Returns seconds.
    """

    def __init__(self, doors: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._doors = doors
        self._clock = clock
        self._uses: dict[tuple[str, Unit], _Use] = defaultdict(_Use)

    def begin(self, caller: Caller) -> None:
        """Count a request. Raises RateLimited."""
        for unit, limit in caller.quota.per_minute:
            wait_s = self._wait_s(caller, unit, limit)
            if wait_s > 0.0:
                share = f" ({limit / self._doors:g} at each of {self._doors} doors)" * (self._doors > 1)
                again = f"try again in {math.ceil(wait_s)} s"
                message = f"{limit} {unit} a minute for this caller{share}: {again}"
                raise RateLimited(message, wait_s, self.states(caller))
        self._add(caller, "requests", 1)

    def spend(self, caller: Caller, tokens: int) -> None:
        self._add(caller, "tokens", tokens)

    def states(self, caller: Caller) -> tuple[RateState, ...]:
        return tuple(self._state(caller, unit, limit) for unit, limit in caller.quota.per_minute)

    def _state(self, caller: Caller, unit: Unit, limit: int) -> RateState:
        used, per_s = self._used(caller, unit, limit), self._per_s(limit)
        return RateState(unit, limit, max(0, math.floor(self._most(limit) - used + _ROUNDING)), used / per_s)

    def _wait_s(self, caller: Caller, unit: Unit, limit: int) -> float:
        """Return the seconds until one more unit is permitted."""
        excess = self._used(caller, unit, limit) + 1 - self._most(limit)
        return round(excess / self._per_s(limit), 3) if excess > _ROUNDING else 0.0

    def _most(self, limit: int) -> float:
        """Return the most that a caller may use at once at this door: at least 1, even if the limit is below
        the number of doors."""
        return max(1.0, limit / self._doors)

    def _per_s(self, limit: int) -> float:
        return limit / self._doors / _MINUTE_S

    def _used(self, caller: Caller, unit: Unit, limit: int) -> float:
        return self._uses[caller.owner, unit].left(self._clock(), self._per_s(limit))

    def _add(self, caller: Caller, unit: Unit, units: int) -> None:
        for limited, limit in caller.quota.per_minute:
            if limited == unit:
                self._uses[caller.owner, unit].add(units, self._clock(), self._per_s(limit))
