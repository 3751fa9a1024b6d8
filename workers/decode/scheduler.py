"""Continuous batching: a request's state, which request is computed next, and what its result means.

Runs on the event loop's thread; only tensor work goes to the compute thread. One turn is: admit, sample
first tokens, read one chunk of appended tokens, one decode step of everything that runs. Cancelling takes
effect between these.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..kv.arrival import KVArrival
from ..messages.events import DecodeReport, FinishEvent, FinishReason, FirstTokenTimings, Token
from ..messages.requests import GenerateJob, Reserve
from ..settings import DecodeConfig
from .rows import Row
from .runner import Chosen, DecodeRunner
from .sessions import Holding, KeptSession

T = TypeVar("T")
DecodeEvent = FirstTokenTimings | Token | FinishEvent

_FAILED_TURNS = 3
"""So many computations of one kind in a row that raised mean that the worker itself is broken."""


@dataclass
class Times:
    """Moments of a request (seconds of one monotonic clock; None: not yet) and what it moved and read.

    complete: the last page was here. ready: nothing was missing any more. taken: the scheduler took it.
    read: its logits were there (appended tokens are read in between). first: the first token was sampled.
    """

    job: float | None = None
    logits: float | None = None
    complete: float | None = None
    ready: float | None = None
    taken: float | None = None
    read: float | None = None
    first: float | None = None
    handoff_bytes: int = 0
    handoff_seconds: float = 0.0
    pages_attended: int = 0
    pages_held: int = 0

    def report(self) -> DecodeReport:
        """The parts are disjoint: they add up to the time from the job (or the logits) to the first token."""
        began = None if self.job is None else max(self.job, self.logits or self.job)
        return DecodeReport(
            handoff_exposed=_span(began, self.complete),
            decode_wait=_span(self.ready, self.taken),
            append_prefill=_span(self.taken, self.read),
            first_step=_span(self.read, self.first),
            handoff_bytes=self.handoff_bytes,
            handoff_seconds=self.handoff_seconds,
            pages_attended=self.pages_attended,
            pages_held=self.pages_held,
        )


def _span(start: float | None, stop: float | None) -> float:
    return 0.0 if start is None or stop is None else max(0.0, stop - start)


@dataclass(eq=False)
class DecodeRequest:
    """All that is known of one request, from reservation to the end. The engine makes and keeps it, the
    scheduler moves it on. `serial` is unique for ever, unlike the request's id.

    reserved, renewed: seconds of the engine's clock. length: tokens whose K/V is in the pages. token: the
    last token chosen, not in the pages yet. logits: of the position before the first token, until that is
    sampled.
    """

    serial: int
    order: Reserve
    holding: Holding
    arrival: KVArrival
    reserved: float
    renewed: float
    length: int
    times: Times = field(default_factory=Times)
    events: asyncio.Queue[DecodeEvent] = field(default_factory=asyncio.Queue)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the prompt's K/V is complete, and when the request ends."""
    job: GenerateJob | None = None
    deadline: float | None = None
    append_ids: array[int] = field(default_factory=lambda: array("I"))
    selects_pages: bool = False
    logits: Any = None
    token: int = 0
    produced: int = 0
    ended: tuple[FinishReason, str] | None = None
    overdue: int = 0
    """How often in a row its lease was found to have run out."""
    kept: KeptSession | None = None
    """The session that was made of its prompt."""

    @property
    def request_id(self) -> str:
        return self.order.request_id

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the answer, a session's included."""
        return self.holding.session_tokens + self.order.prompt_tokens

    @property
    def appending(self) -> bool:
        return self.length < self.holding.session_tokens + len(self.append_ids)

    @property
    def ready(self) -> bool:
        """Whether the scheduler can take it."""
        if self.job is None or self.ended is not None:
            return False
        if self.order.session_id is not None:
            return True
        return self.arrival.complete and self.logits is not None

    def close(self, reason: FinishReason, message: str) -> None:
        """The one way to end; what comes later changes nothing."""
        if self.ended is not None:
            return
        self.ended = (reason, message)
        self.settled.set()
        self.logits = None
        if self.job is not None:
            self.tell_end()
        self.holding.end()

    def tell_end(self) -> None:
        """Queue the one terminal event of a request that has ended."""
        assert self.ended is not None
        reason, message = self.ended
        self.events.put_nowait(
            FinishEvent(self.request_id, reason, self.produced, self.times.report(), message)
        )


class DecodeScheduler:
    """Takes ready requests in order of readiness, at most `config.max_batch` at once.

    Appended tokens of several sessions are read in chunks, in turn. eos_ids end an answer. before_first is
    called once per request, just before its first Token. clock: seconds, for reports.
    """

    def __init__(
        self,
        runner: DecodeRunner,
        thread: Executor,
        before_first: Callable[[DecodeRequest], None],
        config: DecodeConfig,
        eos_ids: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._thread = thread
        self._before_first = before_first
        self._clock = clock
        self._config = config
        self._eos_ids = frozenset(eos_ids)
        self._waiting: deque[DecodeRequest] = deque()
        self._appending: deque[DecodeRequest] = deque()
        self._running: list[DecodeRequest] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._failures: Counter[str] = Counter()
        self.fault = ""

    @property
    def running(self) -> int:
        return len(self._running) + len(self._appending)

    def submit(self, request: DecodeRequest) -> None:
        """A request for which nothing is missing any more."""
        request.times.ready = self._clock()
        self._waiting.append(request)
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def drop_ended(self) -> None:
        """Forget requests that have ended."""
        self._waiting = deque(request for request in self._waiting if request.ended is None)
        self._appending = deque(request for request in self._appending if request.ended is None)
        self._running = [request for request in self._running if request.ended is None]

    async def run(self) -> None:
        """Turns until `stop`."""
        while not self._stopping:
            self.drop_ended()
            if not (self._waiting or self._appending or self._running):
                self._wake.clear()
                await self._wake.wait()
                continue
            firsts = self._admit()
            if firsts:
                await self._sample_first(firsts)
                self.drop_ended()
            if self._appending:
                await self._append()
            self.drop_ended()
            if self._running:
                await self._decode(list(self._running))

    def _admit(self) -> list[DecodeRequest]:
        """Move waiting requests to where there is room; returns those whose first token can be sampled."""
        firsts: list[DecodeRequest] = []
        while self._waiting and self.running + len(firsts) < self._config.max_batch:
            request = self._waiting.popleft()
            request.times.taken = self._clock()
            if request.appending:
                self._appending.append(request)
            else:
                request.times.read = request.times.taken
                firsts.append(request)
        return firsts

    async def _sample_first(self, requests: Sequence[DecodeRequest]) -> None:
        """First tokens; the page that a kept session has to itself is copied by the same computation."""
        logits, rows = [request.logits for request in requests], [_row(request) for request in requests]
        copies = [request.holding.copy_out for request in requests if request.holding.copy_out is not None]
        chosen = await self._computed(
            "first tokens", requests, lambda: self._runner.first_tokens(logits, rows, copies)
        )
        for request, choice in zip(requests, chosen or (), strict=False):
            if request.ended is None:
                request.times.first = self._clock()
                request.logits = None
                self._running.append(request)
                self._deliver(request, choice)

    async def _append(self) -> None:
        """One chunk of the next session request; its first token if that was the last one."""
        request = self._appending.popleft()
        done = request.length - request.holding.session_tokens
        ids: array[int] = request.append_ids[done : done + self._config.append_chunk_tokens]
        last = done + len(ids) == len(request.append_ids)
        pages, start = request.holding.table, request.length
        copy = request.holding.copy_in if done == 0 else None
        self._appending.append(request)
        outcome = await self._computed(
            "appended tokens", [request], lambda: (self._runner.append(pages, start, ids, last, copy),)
        )
        if outcome is None or request.ended is not None:
            return
        request.length += len(ids)
        if last:
            self._appending.remove(request)
            request.logits = outcome[0]
            request.times.read = self._clock()
            await self._sample_first([request])

    async def _decode(self, requests: Sequence[DecodeRequest]) -> None:
        rows = [_row(request) for request in requests]
        chosen = await self._computed("a decode step", requests, lambda: self._runner.decode(rows))
        for request, choice in zip(requests, chosen or (), strict=False):
            if request.ended is None:
                request.length += 1
                request.times.pages_attended += choice.pages_attended
                request.times.pages_held += choice.pages_held
                self._deliver(request, choice)

    async def _computed(
        self, what: str, requests: Sequence[DecodeRequest], work: Callable[[], T]
    ) -> T | None:
        """Run `work` on the compute thread with the requests' pages held; None if it raised."""
        with ExitStack() as held:
            for request in requests:
                held.enter_context(request.holding.hold())
            try:
                result = await asyncio.get_running_loop().run_in_executor(self._thread, work)
                self._failures[what] = 0
                return result
            except Exception as error:
                self._fail(what, requests, error)
                return None

    def _fail(self, what: str, requests: Sequence[DecodeRequest], error: Exception) -> None:
        text = f"{what} failed: {type(error).__name__}: {error}"
        self._failures[what] += 1
        if self._failures[what] >= _FAILED_TURNS:
            self.fault = f"{self._failures[what]} times in a row, {text}"
        for request in requests:
            request.close(FinishReason.FAILED, text)

    def _deliver(self, request: DecodeRequest, choice: Chosen) -> None:
        """Send a token, and end the request if it was the last one."""
        if not math.isfinite(choice.logprob):
            text = "the model's logits are not finite numbers (in float16 its activations may overflow)"
            request.close(FinishReason.FAILED, text)
            return
        if request.produced == 0:
            self._before_first(request)
        request.events.put_nowait(Token(request.produced, choice.token, choice.logprob))
        request.token = choice.token
        request.produced += 1
        assert request.job is not None  # a request without a job is never ready
        sampling = request.job.sampling
        if choice.token in self._eos_ids and not sampling.ignore_eos:
            request.close(FinishReason.STOP, "")
        elif request.produced >= sampling.max_tokens:
            request.close(FinishReason.LENGTH, "")


def _row(request: DecodeRequest) -> Row:
    assert request.job is not None  # a request without a job is never ready
    return Row(
        request.serial,
        request.holding.table,
        request.length,
        request.token,
        request.job.sampling,
        request.selects_pages,
    )
