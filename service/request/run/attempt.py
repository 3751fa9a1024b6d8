"""One try at a request on workers, and how often it is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType

from ....workers.messages.events import PrefillReport
from ....workers.roles import Leased
from ...errors import DeadlineExceeded, Unavailable, WorkerError, WorkerHandoffFailed
from ...fleet.view import Fleet
from ..resources import Resources
from ..timings import REPLAY, TRANSPORT, TtftClock, prefill_parts

log = logging.getLogger(__name__)

Mark = Callable[[str], None]
_FIRST_PAUSE_S = 0.25
"""Before a replay, where no other worker is left; four times as long before each next one, because a worker
takes seconds to come back."""
BUSY_RETRY_S = 5.0
"""Where nobody knows yet how long work takes."""


class Attempt:
    """One try at a request: its place on workers is renewed while the block runs, cancelled when it is left.

    `settle` says that a worker has ended the request by itself. Leaving never waits, so that it works in
    the middle of being cancelled.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.request_id = uuid.uuid4().hex
        self._fleet = fleet
        self._open: list[Leased] = []

    def add(self, link: Leased) -> None:
        self._open.append(link)
        self._fleet.hold(link, self.request_id)

    def settle(self, link: Leased) -> None:
        self._open.remove(link)
        self._fleet.drop(link, self.request_id)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._fleet.cancel(self._open.pop(), self.request_id)


@contextlib.asynccontextmanager
async def within(deadline: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Bound a block by a moment of the wall clock. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.time()) as limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("the deadline passed before the answer was complete") from None


class Replays:
    """How often a request is tried again after a worker failed, and when: at once on others, if there are any
    of its kind. streaming: whether the first token is out, so that lost time no longer belongs to TTFT."""

    def __init__(self, resources: Resources, clock: TtftClock, streaming: Callable[[], bool]) -> None:
        self._resources = resources
        self._clock = clock
        self._streaming = streaming
        self._failures = 0

    async def run(self, once: Callable[[], Awaitable[None]]) -> None:
        """Try until it succeeds. Raises Unavailable when trying again does not help."""
        while True:
            try:
                return await once()
            except WorkerError as error:
                await self.after(error)

    async def after(self, error: WorkerError) -> None:
        """Returns when there may be somebody to go to. Raises Unavailable after the last try."""
        fleet, tries = self._resources.fleet, self._resources.settings.replays + 1
        fleet.forget(error.worker)
        if isinstance(error, WorkerHandoffFailed):
            self._resources.metrics.handoff_failed()
        self._failures += 1
        if self._failures >= tries:
            raise Unavailable(
                f"{error.message}; gave up after {tries} tries", retry_after_s=BUSY_RETRY_S
            ) from error
        log.warning("try %d of %d failed: %s", self._failures, tries, error.message)
        self._resources.metrics.replayed()
        if not fleet.view.ready:
            await asyncio.sleep(_FIRST_PAUSE_S * 4 ** (self._failures - 1))
            await fleet.refresh()
        self.mark(REPLAY)

    def mark(self, part: str) -> None:
        """Count the time since the last mark as `part` of TTFT."""
        if not self._streaming():
            self._clock.lap(part)

    def read(self, report: PrefillReport | None, *, lost: bool = False) -> None:
        """Count the time since the last mark as a prefill group's, by its report. lost: the group died, and
        the rest of that time is lost."""
        if not self._streaming():
            parts = {} if report is None else prefill_parts(report)
            self._clock.span(parts, REPLAY if lost else TRANSPORT)
