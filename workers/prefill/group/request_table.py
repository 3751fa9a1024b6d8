"""A prefill group's requests: who waits, who runs, whose pages are whose, and who is refused. It sends no
command and ends no request. Only the event loop's thread uses it."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Sequence

from ...kv.pages.pool import PagePool, pages_for
from ...messages.requests import PrefillJob, RefusalReason, Refused
from ...messages.stages import ChunkCommand, ChunkReport
from ...messages.states import GroupStats
from ...settings import PrefillConfig
from . import schedule
from .account import Pace, Throughput
from .request import Request

_LONGEST_TURN_S = 60.0
"""The longest retry time told, unless the next place takes longer: some clients never come back."""


class PrefillRequests:
    """The requests by id, until their pages are free. Times are seconds of the controller's clock."""

    def __init__(self, config: PrefillConfig, stages: int) -> None:
        self._config = config
        self._stages = stages
        self._serials = itertools.count(secrets.randbits(48))
        """The first serial is random, because stages outlive a controller and may still hear of a dead one's
        requests."""
        self._pool = PagePool(pages_for(config.cache_tokens))
        self._requests: dict[str, Request] = {}
        self._throughput = Throughput()
        self._pace = Pace(config.chunk_slack_s)
        self._last_turn = 0.0
        """When the last of those that were refused is to come back."""

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def admit(self, job: PrefillJob, now: float) -> Request | Refused:
        refused = self._refusal(job) or self.queue_refusal(job.tokens, now)
        if refused is not None:
            return refused
        request = Request(job, self._stages, now, next(self._serials))
        self._requests[job.request_id] = request
        return request

    def remove(self, request: Request) -> None:
        """Free a request's pages, once no stage knows it."""
        del self._requests[request.job.request_id]
        self._pool.release(request.pages)

    def next(self, now: float) -> Request | None:
        """Choose the request whose chunk is sent next, and give it its pages."""
        unsent = [request.waiting for request in self if request.unsent]
        chosen = schedule.next_request(unsent, now, self._config.ageing_tokens_per_second, self._pool.free)
        if chosen is None:
            return None
        request = self._requests[chosen]
        if not request.opened:
            request.pages = self._pool.allocate(request.waiting.pages)
        return request

    def _refusal(self, job: PrefillJob) -> Refused | None:
        needed, pool = pages_for(job.tokens), self._pool
        if job.request_id in self._requests:
            return Refused(
                reason=RefusalReason.DUPLICATE, message=f"request {job.request_id} is already running here"
            )
        if job.deadline is not None and job.deadline <= time.time():
            return Refused(reason=RefusalReason.DEADLINE, message="the deadline has passed")
        if needed > pool.total:
            message = f"a prompt of {job.tokens} tokens needs {needed} pages; a stage has {pool.total}"
            return Refused(reason=RefusalReason.TOO_LARGE, message=message, needed=needed, free=pool.free)
        return None

    def queue_refusal(self, tokens: int, now: float) -> Refused | None:
        """Those that are refused are told to come back one after the other, as places become free."""
        waiting = sum(not request.opened for request in self._live())
        if waiting < self._config.max_waiting:
            return None
        return Refused(
            reason=RefusalReason.BUSY,
            message=f"{waiting} prompts wait already",
            needed=pages_for(tokens),
            free=self._pool.free,
            retry_after_s=self._next_turn(now),
        )

    def allowed(self, request: Request, command: ChunkCommand) -> float:
        return self._pace.allowed(request.job.method.name, request.pace, command.tokens)

    def chunk_through(
        self,
        request: Request,
        command: ChunkCommand,
        reports: Sequence[ChunkReport],
        sent: float,
        now: float,
    ) -> None:
        self._throughput.chunk(command.tokens, sent, now)
        for other in self:
            if other is not request:
                other.account.other_chunk(reports[-1].wall, now)
        request.account.own_chunk(reports)
        request.pace = self._pace.chunk(request.job.method.name, command.start, command.tokens, reports)
        request.done = command.start + command.tokens

    def stats(self, name: str, now: float) -> GroupStats:
        live = self._live()
        running = sum(request.opened for request in live)
        return GroupStats(
            name=name,
            pages_total=self._pool.total,
            pages_free=self._pool.free,
            running=running,
            waiting=len(live) - running,
            waiting_tokens=self._unread,
            tokens_per_second=self._throughput.tokens_per_second,
            max_waiting=self._config.max_waiting,
            idle_s=0.0 if running else self._throughput.idle(now),
        )

    @property
    def _unread(self) -> int:
        return sum(request.job.tokens - request.done for request in self._live())

    def _next_turn(self, now: float) -> float | None:
        """Return seconds: the mean time between two prompts that are read, after the turn before. None while
        the rate is unknown."""
        rate = self._throughput.tokens_per_second
        if rate <= 0:
            return None
        between = self._unread / rate / len(self._live())
        self._last_turn = min(max(self._last_turn, now) + between, now + max(between, _LONGEST_TURN_S))
        return self._last_turn - now

    def _live(self) -> list[Request]:
        return [request for request in self if not request.ended]
