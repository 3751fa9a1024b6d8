from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from ...kv.pages.pool import pages_for
from ...messages.events import PrefillDone
from ...messages.requests import PrefillCancelled, PrefillFailed, PrefillJob, Refused
from ...messages.stages import ChunkCommand, OpenRequest
from ...roles import PrefillEvent
from ...tracing import NO_SPAN
from . import schedule
from .account import Account
from .chunks import ChunkSizes


class Request:
    """arrived: the controller's seconds."""

    def __init__(self, job: PrefillJob, stages: int, arrived: float, serial: int) -> None:
        self.job = job
        self.serial = serial
        self.pages: tuple[int, ...] = ()
        """The same on every stage. Its first chunk takes them."""
        self.waiting = schedule.arrival(
            job.request_id, job.tokens - job.start, arrived, pages_for(job.tokens)
        )
        self.account = Account(stages=stages, method=job.method, arrived=arrived)
        self.span = NO_SPAN
        self.events: asyncio.Queue[PrefillEvent | PrefillFailed] = asyncio.Queue()
        self.sent = job.start
        self.done = job.start
        """Tokens before `sent` have entered the pipeline; those before `done` have left it."""
        self.pace: float | None = None
        """Seconds a token of its last chunk, on the slowest stage."""
        self.in_flight = 0
        self.closing: asyncio.Task[None] | None = None
        self._next_sizes: deque[int] = deque()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def ended(self) -> bool:
        return self.closing is not None

    @property
    def opened(self) -> bool:
        return self.waiting.opened

    @property
    def unsent(self) -> bool:
        return not self.ended and self.sent < self.job.tokens

    def open_request(self) -> OpenRequest:
        job = self.job
        return OpenRequest(
            request_id=job.request_id,
            pages=self.pages,
            prompt_tokens=job.tokens,
            method=job.method,
            decode_worker=job.decode_worker,
            serial=self.serial,
            start=job.start,
            attempt=job.attempt,
        )

    def next_chunk(self, sizes: ChunkSizes) -> ChunkCommand:
        """Count the next chunk's tokens as sent. A resumed prompt is cut as from its beginning, so that the
        same bits come out."""
        start, total = self.sent, self.job.tokens
        if not self._next_sizes:
            sizes_from_start = sizes.of(self.job.method, 0, total)
            self._next_sizes = deque(
                _rest(sizes_from_start, start) or sizes.of(self.job.method, start, total)
            )
        self.sent = start + self._next_sizes.popleft()
        return ChunkCommand(
            request_id=self.job.request_id,
            start=start,
            tokens=self.sent - start,
            last=self.sent == total,
            wants_logits=self.job.wants_logits,
            token_ids=self.job.token_ids[4 * start : 4 * self.sent],
        )

    def end_span(self, event: PrefillEvent | PrefillFailed | None, now: float) -> None:
        """event: what ended the request; None if its caller stopped reading."""
        began, error = self.account.began, ""
        self.span.part("queue", self.account.arrived, now if began is None else began)
        finish = "cancelled"
        if isinstance(event, PrefillFailed) and not isinstance(event, PrefillCancelled):
            finish, error = "failed", str(event)
        elif isinstance(event, PrefillDone):
            finish = "finished"
        elif isinstance(event, Refused):
            finish = event.reason.value
        self.span.end(finish, error, tokens_done=self.done)

    def after(self, seconds: float, name: str, action: Callable[[], object]) -> None:
        """Call `action` in `seconds`. A later call of the same name replaces it."""
        self._disarm(name)
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(max(0.0, seconds), action)

    def disarm(self) -> None:
        for name in list(self._timers):
            self._disarm(name)

    def _disarm(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


def _rest(cut: Sequence[int], start: int) -> Sequence[int]:
    before = 0
    for number, tokens in enumerate(cut):
        if before == start:
            return cut[number:]
        before += tokens
    return ()
