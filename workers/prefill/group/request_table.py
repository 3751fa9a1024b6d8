"""The requests of a prefill group: who waits, who runs, whose pages are whose, and who is refused.

Plain bookkeeping of the event loop's thread: nothing here sends a command or ends a request.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...kv.pages.pool import PagePool, pages_for
from ...messages.requests import PrefillJob, RefusalReason, Refused, Wish
from ...messages.stages import ChunkCommand, ChunkReport
from ...messages.states import GroupStats
from ...settings import PrefillConfig
from . import backlog, schedule
from .account import Pace, Throughput
from .request import Request


class PrefillRequests:
    """By id, from admission until their pages are free. stages: how many the group has. Moments are seconds
    of the controller's clock."""

    def __init__(self, config: PrefillConfig, stages: int) -> None:
        self._config = config
        self._stages = stages
        self._serials = itertools.count(secrets.randbits(48))
        """From anywhere: stages outlive a controller, and may still hear what one that died has called."""
        self._pool = PagePool(pages_for(config.cache_tokens))
        self._requests: dict[str, Request] = {}
        self._promises = backlog.Promises()
        self._throughput = Throughput()
        self._pace = Pace(config.chunk_slack_s)

    def __iter__(self) -> Iterator[Request]:
        """Those that are here, ended ones included."""
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def admit(self, job: PrefillJob, now: float) -> Request | Refused:
        """A request that waits, or why there is none."""
        wish = job.wish
        refused = self._refusal(job, now) or self.full(wish, now)
        if refused is not None:
            return refused
        self._promises.kept(wish.checksum)
        request = Request(job, self._stages, now, next(self._serials))
        self._requests[job.request_id] = request
        return request

    def remove(self, request: Request) -> None:
        """No stage knows of it any more: its pages are free."""
        del self._requests[request.job.request_id]
        self._pool.release(request.pages)

    def next(self, now: float) -> Request | None:
        """Whose chunk is to be sent; it has its pages."""
        unsent = [request.waiting for request in self if request.unsent]
        chosen = schedule.next_request(unsent, now, self._config.ageing_tokens_per_second, self._pool.free)
        if chosen is None:
            return None
        request = self._requests[chosen]
        if not request.opened:
            request.pages = self._pool.allocate(request.waiting.pages)
        return request

    def _refusal(self, job: PrefillJob, now: float) -> Refused | None:
        needed, pool = pages_for(job.tokens), self._pool
        if job.request_id in self._requests:
            return Refused(RefusalReason.DUPLICATE, f"request {job.request_id} is already running here")
        if job.deadline is not None and job.deadline <= time.time():
            return Refused(RefusalReason.DEADLINE, "the deadline has passed")
        if needed > pool.total:
            message = f"a prompt of {job.tokens} tokens needs {needed} pages; a stage has {pool.total}"
            return Refused(RefusalReason.TOO_LARGE, message, needed, pool.free)
        return None

    def full(self, wish: Wish, now: float) -> Refused | None:
        """What is refused for the queue; None if there is a place in it that is not held for who was told to
        come back before this prompt would be read."""
        waiting = sum(not request.opened for request in self._live())
        until = now + self._seconds_of(self._unread + wish.tokens)
        held = self._promises.held(wish.checksum, until, now, self._config.max_waiting)
        if waiting + held < self._config.max_waiting:
            return None
        message = f"{waiting} prompts wait already" + f", and {held} were told to come back now" * (held > 0)
        comes_back = self._comes_back(wish, now)
        return Refused(RefusalReason.BUSY, message, pages_for(wish.tokens), self._pool.free, comes_back)

    def allowed(self, request: Request, command: ChunkCommand) -> float:
        """Seconds that a stage may take for a chunk before it is asked whether it lives, as known by now."""
        return self._pace.allowed(request.job.method.name, request.pace, command.tokens)

    def chunk_through(
        self, request: Request, command: ChunkCommand, reports: Sequence[ChunkReport], sent: float, now: float
    ) -> None:
        """Keep the books of a chunk that all stages have finished."""
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
        """Tokens."""
        return sum(request.job.tokens - request.done for request in self._live())

    def _seconds_of(self, tokens: int) -> float:
        """To read them; 0 while the group's rate is not known."""
        rate = self._throughput.tokens_per_second
        return tokens / rate if rate > 0 else 0.0

    def _live(self) -> list[Request]:
        return [request for request in self if not request.ended]

    def _comes_back(self, wish: Wish, now: float) -> float | None:
        """Seconds after which a refused prompt should come back; None while the group's rate is not known."""
        rate = self._throughput.tokens_per_second
        if rate <= 0:
            return None
        play = backlog.Play(
            [replace(one.waiting, remaining=one.job.tokens - one.done) for one in self._live()],
            now,
            self._config.ageing_tokens_per_second,
            rate,
            self._pool.free + sum(len(request.pages) for request in self if request.ended),
            self._config.chunk_tokens,
        )
        return self._promises.give(play, wish.checksum, wish.tokens, self._config.max_waiting, now)
