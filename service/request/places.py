"""Limits the messages that are received at once, and calls without authentication."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from deltafront.service.errors import InvalidArgument, Overloaded, TooSlow
from deltafront.service.request.callers import RETRY_S, fits_share

_T = TypeVar("_T")
_RECEIVING_BYTES = 256 << 20
"""The most bytes of messages that are received at once. Each counts with the maximum size."""
_ROOM_TIMEOUT_S = 10.0
_RECEIVE_TIMEOUT_S = 60.0
_KEPT_S = 5.0
_CANCEL_WAIT_S = 0.1
"""How long to delay the answer to a call without a request, because gRPC may be about to cancel it."""


@dataclass(eq=False)
class _Place:
    owner: str
    since: float
    timeout: asyncio.Timeout


class ReceiveLimit:
    """Limits the messages that are received at once, in all and per caller, and the time for each.

    gRPC does not report how much of a message has arrived. So a message keeps its slot for at least _KEPT_S.
    After that, until _RECEIVE_TIMEOUT_S, a waiting message may take over the slot.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._places = max(_RECEIVING_BYTES // max_message_bytes, 4)
        self._held: list[_Place] = []
        self._freed = asyncio.Event()

    async def receive(self, owner: str, requests: AsyncIterator[Any]) -> Any:
        """Receive the first message of an authenticated call. Raises Overloaded, TooSlow or
        InvalidArgument.
        """
        await self._wait_for_place(owner)
        with late(_RECEIVE_TIMEOUT_S):
            place = _Place(owner, _now(), asyncio.timeout(_RECEIVE_TIMEOUT_S))
            self._held.append(place)
            try:
                async with place.timeout:
                    return await first_of(requests)
            finally:
                self._held.remove(place)
                self._freed.set()
                self._freed = asyncio.Event()

    async def _wait_for_place(self, owner: str) -> None:
        if self._fits(owner):
            return
        try:
            async with asyncio.timeout(_ROOM_TIMEOUT_S):
                while not self._fits(owner):
                    self._shorten()
                    await self._freed.wait()
        except TimeoutError:
            message = "this server receives as many requests as it can hold: try again"
            raise Overloaded(message, retry_after_s=RETRY_S) from None

    def _fits(self, owner: str) -> bool:
        mine = sum(place.owner == owner for place in self._held)
        return fits_share(owner, mine + 1, len(self._held) + 1, self._places)

    def _shorten(self) -> None:
        """Shorten the time of the oldest message of the owner with the most messages."""
        counts = collections.Counter(place.owner for place in self._held)
        for place in sorted(self._held, key=lambda place: -counts[place.owner]):
            end = max(place.since + _KEPT_S, _now())
            if (place.timeout.when() or 0.0) > end:
                return place.timeout.reschedule(end)


@dataclass(eq=False)
class OpenCall:
    """A call without a bearer token (health, reflection), and the time at which it must end."""

    connection: str
    until: float
    waiting: asyncio.Timeout | None = None

    async def wait(self, awaitable: Awaitable[_T]) -> _T:
        """Await something until the call must end. Raises TimeoutError.

        Only these waits are cut short, because gRPC never ends a call that is cancelled while it sends.
        """
        try:
            async with asyncio.timeout_at(self.until) as self.waiting:
                return await awaitable
        finally:
            self.waiting = None

    def end(self) -> None:
        self.until = _now()
        if self.waiting is not None and not self.waiting.expired():
            self.waiting.reschedule(self.until)


class NewestOnly:
    """Limits calls without a bearer token. If there are too many, a new call ends the oldest one.

    Args:
        each_s: The longest duration of a call, in seconds.
        per_connection: Maximum calls of one connection. None: no separate limit.
    """

    def __init__(self, places: int, each_s: float, per_connection: int | None = None) -> None:
        self._places = places
        self._each_s = each_s
        self._per_connection = per_connection
        self._calls: list[OpenCall] = []

    @contextlib.contextmanager
    def call(self, connection: str) -> Iterator[OpenCall]:
        mine = [call for call in self._calls if call.connection == connection]
        if self._per_connection is not None and len(mine) >= self._per_connection:
            self._end(mine[0])
        if len(self._calls) >= self._places:
            self._end(self._calls[0])
        self._calls.append(call := OpenCall(connection, _now() + self._each_s))
        try:
            yield call
        finally:
            if call in self._calls:
                self._calls.remove(call)

    def _end(self, call: OpenCall) -> None:
        self._calls.remove(call)
        call.end()


def _now() -> float:
    return asyncio.get_running_loop().time()


@contextlib.contextmanager
def late(seconds: float) -> Iterator[None]:
    """Turn a TimeoutError of the `with` block into TooSlow."""
    try:
        yield
    except TimeoutError:
        raise TooSlow(f"the request did not arrive within {seconds:.0f} s, or others waited") from None


async def first_of(requests: AsyncIterator[Any]) -> Any:
    """Receive the call's message. Raises InvalidArgument if it has none."""
    async for request in requests:
        return request
    await asyncio.sleep(_CANCEL_WAIT_S)
    raise InvalidArgument("request", "is missing")
