"""The table of a prefill group's waiting and running requests. It allocates their pages and refuses requests.

The controller sends commands and ends requests; this module does neither. Only the event loop's thread uses
it.
"""

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from deltafront.workers.kv.pages.pool import PagePool, pages_for
from deltafront.workers.messages.events import PrefillDone, PrefillQueued
from deltafront.workers.messages.requests import (
    PrefillCancelled,
    PrefillFailed,
    PrefillJob,
    RefusalReason,
    Refused,
)
from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.messages.stages import ChunkCommand, ChunkReport, OpenRequest
from deltafront.workers.messages.states import GroupStats, Queued
from deltafront.workers.pace import Recent
from deltafront.workers.prefill.group import schedule
from deltafront.workers.prefill.group.account import Account, Pace, Throughput
from deltafront.workers.prefill.group.chunks import ChunkSizes
from deltafront.workers.prefill.group.cost import CostFit
from deltafront.workers.roles import PrefillEvent
from deltafront.workers.settings import PrefillConfig
from deltafront.workers.tracing import NO_SPAN
from deltafront.workers.turns import Turns

_LONGEST_TURN_S = 60.0
"""Upper limit of retry times in seconds, unless the next free place takes longer. Without a limit, clients
that never return would make retry times grow."""


class Request:
    """One prompt in prefill. `arrived` is in seconds of the controller's clock."""

    def __init__(self, job: PrefillJob, stages: int, arrived: float, serial: int) -> None:
        self.job = job
        self.serial = serial
        self.pages: tuple[int, ...] = ()
        """The request's page table, the same on every stage; empty before its first chunk."""
        left, pages = job.tokens - job.start, pages_for(job.tokens)
        self.waiting = schedule.arrival(job.request_id, left, arrived, pages, job.service_tier)
        self.account = Account(stages=stages, method=job.method, arrived=arrived)
        self.span = NO_SPAN
        self.events: asyncio.Queue[PrefillEvent | PrefillFailed] = asyncio.Queue()
        self.sent = job.start
        self.done = job.start
        """Tokens before `sent` have been sent to the stages. Tokens before `done` have left the last
        stage."""
        self.pace: float | None = None
        """Seconds per token of the request's last chunk on the slowest stage."""
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
            state_places=job.state_places,
        )

    def next_tokens(self, sizes: ChunkSizes) -> int:
        """Return the number of tokens of the next chunk.

        If a resumed prompt starts at a chunk boundary of a new prompt, both are cut at the same tokens from
        there on, so that results are bitwise equal.
        """
        if not self._next_sizes:
            method, start, total = self.job.method, self.sent, self.job.tokens
            whole = sizes.of(method, 0, total)
            starts = list(itertools.accumulate(whole, initial=0))
            rest = whole[starts.index(start) :] if start in starts else sizes.of(method, start, total)
            self._next_sizes = deque(rest)
        return self._next_sizes[0]

    def next_chunk(self, sizes: ChunkSizes) -> ChunkCommand:
        """Make the command for the next chunk, and count its tokens as sent."""
        start, total = self.sent, self.job.tokens
        self.sent = start + self.next_tokens(sizes)
        self._next_sizes.popleft()
        return ChunkCommand(
            request_id=self.job.request_id,
            start=start,
            tokens=self.sent - start,
            last=self.sent == total,
            wants_logits=self.job.wants_logits,
            token_ids=self.job.token_ids[4 * start : 4 * self.sent],
        )

    def end_span(self, event: PrefillEvent | PrefillFailed | None, now: float) -> None:
        """End the request's trace span. `event` is the request's last event; None: the caller has left."""
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
        """Call `action` after `seconds`. A later timer of the same `name` replaces this one."""
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = asyncio.get_running_loop().call_later(max(0.0, seconds), action)

    def disarm(self) -> None:
        for timer in self._timers.values():
            timer.cancel()


class PrefillRequests:
    """A prefill group's requests, by id, until their pages are free. Times are seconds of the controller's
    clock.

    Args:
        batch_tokens: As in `ModelWork`.
    """

    def __init__(self, config: PrefillConfig, stages: int, batch_tokens: int = 0) -> None:
        self._config = config
        self._stages = stages
        self._batch_tokens = batch_tokens
        self._serials = itertools.count(secrets.randbits(48))
        """The first serial is random, because stages outlive a controller, and serials must not repeat."""
        self._pool = PagePool(pages_for(config.cache_tokens))
        self._requests: dict[str, Request] = {}
        self._turns = Turns()
        self._throughput = Throughput()
        self._costs: dict[str, CostFit] = {}
        """The learned cost of each method."""
        self._began = 0.0
        """The time at which the oldest chunk in flight began."""
        self._fetched = Recent()
        self._pace = Pace(config.chunk_slack_s)
        self._last_turn = 0.0
        """The time at which the last refused prompt was told to try again."""

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def admit(self, job: PrefillJob, now: float) -> Request | Refused:
        refused = self._refusal(job) or self.queue_refusal(job.tokens, job.service_tier, now)
        if refused is not None:
            return refused
        method, tier = job.method.name, job.service_tier
        expected_s = self.stats("", now).expected_s(method, job.start, job.tokens, tier)
        request = Request(job, self._stages, now, next(self._serials))
        if expected_s is not None:
            request.events.put_nowait(PrefillQueued(expected_s=expected_s))
        self._requests[job.request_id] = request
        return request

    def remove(self, request: Request) -> None:
        """Free a request's pages, after every stage has closed it."""
        del self._requests[request.job.request_id]
        self._pool.release(request.pages)

    def next(self, now: float) -> Request | None:
        """Choose the request whose chunk is sent next, and allocate its pages if it has none."""
        request = self._first(list(self), now)
        if request is None:
            return None
        if all(one.sent == one.done for one in self):
            self._began = now
        return self._with_pages(request)

    def next_beside(
        self, batch: Sequence[Request], left: int, now: float, sizes: ChunkSizes
    ) -> Request | None:
        """Choose the request whose chunk follows those of `batch`, if it can join their batch: its method is
        theirs, and its chunk has at most `left` tokens. Allocate its pages if it has none."""
        if left <= 0:
            return None
        request = self._first([one for one in self if one not in batch], now)
        if request is None or request.job.method != batch[0].job.method or request.next_tokens(sizes) > left:
            return None
        return self._with_pages(request)

    def _first(self, requests: Sequence[Request], now: float) -> Request | None:
        unsent = [request.waiting for request in requests if request.unsent]
        order = self._turns.order(waiting.tier for waiting in unsent)
        chosen = schedule.next_of_tiers(unsent, order, now, self._ageing, self._pool.free)
        return None if chosen is None else self._requests[chosen]

    def _with_pages(self, request: Request) -> Request:
        if not request.opened:
            request.pages = self._pool.allocate(request.waiting.pages)
        return request

    @property
    def _ageing(self) -> float:
        return schedule.ageing_of(self._throughput.tokens_per_second)

    def chunk_sent(self, request: Request, tokens: int, now: float) -> None:
        waiting = {other.waiting.tier for other in self if other.unsent}
        self._turns.give(request.waiting.tier, tokens, waiting)
        request.waiting = schedule.chunk_sent(request.waiting, tokens, now, self._ageing)

    def _refusal(self, job: PrefillJob) -> Refused | None:
        needed, pool = pages_for(job.tokens), self._pool
        if job.request_id in self._requests:
            message = f"request {job.request_id} is already running here"
            return Refused(reason=RefusalReason.DUPLICATE, message=message)
        if job.deadline is not None and job.deadline <= time.time():
            return Refused(reason=RefusalReason.DEADLINE, message="the deadline has passed")
        if needed > pool.total:
            message = f"a prompt of {job.tokens} tokens needs {needed} pages; a stage has {pool.total}"
            return Refused(reason=RefusalReason.TOO_LARGE, message=message, needed=needed, free=pool.free)
        return None

    def queue_refusal(self, tokens: int, tier: ServiceTier, now: float) -> Refused | None:
        """Return a refusal if `max_waiting` prompts of the service tier wait already, else None. Refused
        prompts get successive retry times, at the rate at which places in the queue become free
        (`_next_turn`).
        """
        waiting = sum(not request.opened and request.waiting.tier is tier for request in self._live())
        if waiting < self._config.max_waiting:
            return None
        return Refused(
            reason=RefusalReason.BUSY,
            message=f"{waiting} prompts wait already",
            needed=pages_for(tokens),
            free=self._pool.free,
            retry_after_s=self._next_turn(now),
        )

    def allowed(self, chunks: Sequence[tuple[Request, ChunkCommand]]) -> float:
        """Return the seconds that a stage may take for a batch of chunks."""
        return self._pace.allowed(
            chunks[0][0].job.method.name, [(request.pace, command.tokens) for request, command in chunks]
        )

    def batch_through(
        self, chunks: Sequence[tuple[Request, ChunkCommand, Sequence[ChunkReport]]], sent: float, now: float
    ) -> None:
        """Record a batch's chunks that the last stage has finished."""
        commands, method = [command for _, command, _ in chunks], chunks[0][0].job.method.name
        fetched_s = 0.0
        for _, command, reports in chunks:
            if own_s := max(report.phases.get("kv_fetch", 0.0) for report in reports):
                self._fetched.add(command.start, own_s)
                fetched_s += own_s
        tokens = sum(command.tokens for command in commands)
        worked = self._throughput.record_batch(tokens, min(now, sent + fetched_s), now)
        fit = self._costs.setdefault(method, CostFit(self._config.chunk_tokens))
        fit.record_batch([(command.start, command.tokens) for command in commands], worked)
        self._began = now
        took = {request: reports[-1].wall for request, _, reports in chunks}
        for other in self:
            if others_s := sum(took.values()) - took.get(other, 0.0):
                other.account.other_chunk(others_s, now)
        for request, command, reports in chunks:
            request.account.record_chunk(reports)
            request.pace = self._pace.record_chunk(method, command.start, command.tokens, reports)
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
            waiting_tokens=self._unread(),
            tokens_per_second=self._throughput.tokens_per_second,
            max_waiting=self._config.max_waiting,
            fetched_tokens_per_second=self._fetched.tokens_per_second,
            idle_s=0.0 if running else self._throughput.idle(now),
            costs=tuple((method, fit.cost) for method, fit in self._costs.items()),
            queue=tuple(self._queue(now)),
        )

    def _queue(self, now: float) -> Iterator[Queued]:
        """Yield the unsent tokens of each live request whose method has a learned cost, their expected
        seconds, and the request's service tier. A request's chunks in flight are a separate item with 0
        tokens, since no prompt overtakes them.
        """
        spent = now - self._began
        for request in self._live():
            total, fit = request.job.tokens, self._costs.get(request.job.method.name)
            if fit is None:
                continue
            if request.sent > request.done:
                seconds = fit.cost.seconds(request.done, request.sent)
                yield 0, max(0.0, seconds - spent), request.waiting.tier
                spent = max(0.0, spent - seconds)
            if request.sent < total:
                seconds = fit.cost.queued_seconds(request.sent, total, self._batch_tokens)
                yield total - request.sent, seconds, request.waiting.tier

    def _unread(self) -> int:
        return sum(request.job.tokens - request.done for request in self._live())

    def _next_turn(self, now: float) -> float | None:
        """Return the seconds after which a refused prompt should try again; None while the rate is unknown.

        Successive refused prompts are told times that lie one interval apart: the mean time to prefill a
        prompt of the queue. The longest time is `_LONGEST_TURN_S`, or the interval if that is longer.
        """
        rate = self._throughput.tokens_per_second
        if rate <= 0:
            return None
        between = self._unread() / rate / len(self._live())
        self._last_turn = min(max(self._last_turn, now) + between, now + max(between, _LONGEST_TURN_S))
        return self._last_turn - now

    def _live(self) -> list[Request]:
        return [request for request in self if not request.ended]
