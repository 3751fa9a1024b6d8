"""An attempt's leases on workers, a request's deadline, and retries after failed attempts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from deltafront.service.errors import DeadlineExceeded, Unavailable, WorkerError, WorkerHandoffFailed
from deltafront.service.fleet.fleet import Fleet
from deltafront.service.request.context import Resources
from deltafront.service.request.ttft_clock import REPLAY, TtftClock
from deltafront.workers.roles import Leased

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.25
"""The first pause before a retry if no other worker is left. Each further pause is four times as long."""
BUSY_RETRY_S = 5.0
"""The retry time after a refusal that names none."""


class WorkerLeases:
    """One attempt's leases on workers. As a context manager it renews them, and cancels the attempt on these
    workers at the end.

    Its exit never waits, so it works while the task is being cancelled. Workers know the attempt by
    `request_id`, which begins with the request's id, so that logs show both.
    """

    def __init__(self, fleet: Fleet, request_id: str) -> None:
        self.request_id = f"{request_id}~{uuid.uuid4().hex[:12]}"
        self._fleet = fleet
        self._workers: list[Leased] = []

    def add(self, worker: Leased) -> None:
        self._workers.append(worker)
        self._fleet.hold_lease(worker, self.request_id)

    def settle(self, worker: Leased) -> None:
        """Drop the lease on a worker that has already ended the request."""
        self._workers.remove(worker)
        self._fleet.drop_lease(worker, self.request_id)

    def __enter__(self) -> WorkerLeases:
        return self

    def __exit__(self, *_error: object) -> None:
        while self._workers:
            self._fleet.cancel(self._workers.pop(), self.request_id)


@contextlib.asynccontextmanager
async def deadline_timeout(deadline: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the `with` block at the deadline. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.time()) as timeout:
            yield timeout
    except TimeoutError:
        if not timeout.expired():
            raise
        raise DeadlineExceeded("the deadline passed before the answer was complete") from None


@dataclass
class Replays:
    """Counts a request's failed attempts and decides about retries."""

    resources: Resources
    clock: TtftClock
    request_id: str
    failures: int = 0

    async def back_off(self, error: WorkerError) -> None:
        """Wait before the next attempt. Raises Unavailable if no attempt is left."""
        fleet, tries = self.resources.fleet, self.resources.settings.replays + 1
        fleet.forget(error.worker)
        if isinstance(error, WorkerHandoffFailed):
            self.resources.metrics.count_handoff_failure()
        self.failures += 1
        if self.failures >= tries:
            raise Unavailable(
                f"{error.message}; gave up after {tries} tries", retry_after_s=BUSY_RETRY_S
            ) from error
        log.warning(
            "try %d of %d failed: %s",
            self.failures,
            tries,
            error.message,
            extra={"request_id": self.request_id},
        )
        self.resources.metrics.count_replay()
        if not fleet.view.ready:
            await asyncio.sleep(_FIRST_PAUSE_S * 4 ** (self.failures - 1))
            with contextlib.suppress(Unavailable):  # the next attempt waits for a worker
                await fleet.refresh()
        self.clock.lap(REPLAY)
