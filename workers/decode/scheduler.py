"""Continuous batching: which request is computed next, and what its result means.

Runs on the event loop's thread; only tensor work goes to the compute thread. One turn is: admit, sample
first tokens, read one chunk of appended tokens, one decode step of everything that runs. Cancelling takes
effect between these.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..messages import FinishReason, Token
from .lifecycle import Lifecycle
from .request import DecodeRequest
from .runner import Chosen, DecodeCompute, Row

T = TypeVar("T")

_FAILED_TURNS = 3
"""So many computations of one kind in a row that raised mean that the worker itself is broken."""


class DecodeScheduler:
    """Takes ready requests in order of readiness, at most `max_batch` at once.

    Appended tokens of several sessions are read in chunks, in turn. eos_ids end an answer. before_first is
    called once per request, just before its first Token.
    """

    def __init__(
        self,
        compute: DecodeCompute,
        executor: ThreadPoolExecutor,
        lifecycle: Lifecycle,
        before_first: Callable[[DecodeRequest], None],
        *,
        max_batch: int,
        chunk_tokens: int,
        eos_ids: Sequence[int],
    ) -> None:
        self._compute = compute
        self._executor = executor
        self._lifecycle = lifecycle
        self._before_first = before_first
        self._max_batch = max_batch
        self._chunk_tokens = chunk_tokens
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
        request.times.ready = time.perf_counter()
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
            if self._appending:
                await self._append()
            self.drop_ended()
            if self._running:
                await self._decode(list(self._running))

    def _admit(self) -> list[DecodeRequest]:
        """Move waiting requests to where there is room; returns those whose first token can be sampled."""
        firsts: list[DecodeRequest] = []
        while self._waiting and self.running + len(firsts) < self._max_batch:
            request = self._waiting.popleft()
            request.times.taken = time.perf_counter()
            if request.appending:
                self._appending.append(request)
            else:
                request.times.read = request.times.taken
                firsts.append(request)
        return firsts

    async def _sample_first(self, requests: Sequence[DecodeRequest]) -> None:
        logits, rows = [request.logits for request in requests], [_row(request) for request in requests]
        chosen = await self._computed(
            "first tokens", requests, lambda: self._compute.first_tokens(logits, rows)
        )
        for request, choice in zip(requests, chosen or (), strict=False):
            if request.ended is None:
                request.times.first = time.perf_counter()
                request.logits = None
                self._running.append(request)
                self._deliver(request, choice)

    async def _append(self) -> None:
        """One chunk of the next session request; its first token if that was the last one."""
        request = self._appending.popleft()
        done = request.length - request.holding.session_tokens
        ids: array[int] = request.append_ids[done : done + self._chunk_tokens]
        last = done + len(ids) == len(request.append_ids)
        pages, start = request.holding.table, request.length
        self._appending.append(request)
        outcome = await self._computed(
            "appended tokens", [request], lambda: (self._compute.append(pages, start, ids, last),)
        )
        if outcome is None or request.ended is not None:
            return
        request.length += len(ids)
        if last:
            self._appending.remove(request)
            request.logits = outcome[0]
            request.times.read = time.perf_counter()
            await self._sample_first([request])

    async def _decode(self, requests: Sequence[DecodeRequest]) -> None:
        rows = [_row(request) for request in requests]
        chosen = await self._computed("a decode step", requests, lambda: self._compute.decode(rows))
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
        for request in requests:
            self._lifecycle.pin(request)
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._executor, work)
            self._failures[what] = 0
            return result
        except Exception as error:
            self._fail(what, requests, error)
            return None
        finally:
            for request in requests:
                self._lifecycle.unpin(request)

    def _fail(self, what: str, requests: Sequence[DecodeRequest], error: Exception) -> None:
        text = f"{what} failed: {type(error).__name__}: {error}"
        self._failures[what] += 1
        if self._failures[what] >= _FAILED_TURNS:
            self.fault = f"{self._failures[what]} times in a row, {text}"
        for request in requests:
            self._lifecycle.close(request, FinishReason.FAILED, text)

    def _deliver(self, request: DecodeRequest, choice: Chosen) -> None:
        """Send a token, and end the request if it was the last one."""
        if not math.isfinite(choice.logprob):
            text = "the model's logits are not finite numbers (in float16 its activations may overflow)"
            self._lifecycle.close(request, FinishReason.FAILED, text)
            return
        if request.produced == 0:
            self._before_first(request)
        event = Token(request.produced, choice.token, choice.logprob)
        request.events.put_nowait(event)
        request.token = choice.token
        request.produced += 1
        assert request.job is not None  # a request without a job is never ready
        sampling = request.job.sampling
        if choice.token in self._eos_ids and not sampling.ignore_eos:
            self._lifecycle.close(request, FinishReason.STOP, "")
        elif request.produced >= sampling.max_tokens:
            self._lifecycle.close(request, FinishReason.LENGTH, "")


def _row(request: DecodeRequest) -> Row:
    assert request.job is not None  # a request without a job is never ready
    sampling: Any = request.job.sampling
    return Row(request.serial, request.holding.table, request.length, request.token, sampling, request.delta)
