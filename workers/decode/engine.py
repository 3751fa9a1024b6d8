"""A decode worker without Ray: receives K/V, keeps sessions, decodes with continuous batching.

The asyncio methods below run on the event loop's thread, which owns all bookkeeping. Tensors are computed on
a compute thread (`scheduler`, `runner`) and received K/V is written on a hand-off thread (`kv.transports`),
so that renewing and cancelling never wait for either.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from ..kv.arrival import ArrivalError, KVArrival
from ..kv.page_pool import PAGE_TOKENS, OutOfPages, PagePool, pages_for
from ..kv.transports import receiver
from ..messages import (
    DECODE_PREFIX,
    DecodeFailed,
    DecodeReport,
    DecodeStats,
    FinishEvent,
    FinishReason,
    FirstLogits,
    FirstTokenTimings,
    GenerateJob,
    KeepSession,
    KVAnnouncement,
    OwnerUse,
    Prefix,
    RefusalReason,
    Refused,
    Reserve,
    Reserved,
    SessionKept,
)
from ..model.decoder import LayerStack, load_model
from ..settings import DecodeConfig, HandoffConfig, ModelSpec
from .page_selection import PageSelectionError, plan_layers
from .runner import DecodeRunner, warm_up
from .scheduler import DecodeEvent, DecodeRequest, DecodeScheduler
from .sessions import DecodePages, SessionsTable, appended_ids
from .waiting import HoldTime, ReserveQueue, seconds_until_room

_TICK_S = 0.1
"""How often deadlines and leases are looked at."""
_OVERDUE_TICKS = 5
"""A lease must be found run out so often: where this process itself stood still, renewals that have come
meanwhile are heard only now."""
_STARTING = "the decode worker is still starting"
_CLOSING = "the decode worker is shutting down"


class DecodeEngine:
    """One worker: construct it, `await start()`, and `await close()` at the end.

    name: the actor's name (`decode:<id>`); session ids begin with its id. wall: seconds since the epoch.
    clock: seconds, for reports and leases. Raises PageSelectionError or ValueError for a configuration that
    does not fit the model.
    """

    def __init__(
        self,
        name: str,
        stack: LayerStack,
        config: DecodeConfig,
        handoff: HandoffConfig = HandoffConfig(),  # noqa: B008
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        model = stack.config
        self.name = name
        self._config = config
        self._model = model
        self._wall = wall
        self._clock = clock
        self._plan = plan_layers(config, model.layers)
        pool = PagePool(config.cache_tokens // PAGE_TOKENS, on_free=self._pages_came_back)
        sessions = SessionsTable(name.removeprefix(DECODE_PREFIX), pool, config.max_session_ttl_s)
        self._pages = DecodePages(pool, sessions, model.positions)
        longest = min(pool.total, pages_for(model.positions))
        self._runner = DecodeRunner(
            stack, self._plan, pages=pool.total, max_batch=config.max_batch, max_pages=longest
        )
        self._threads = [
            ThreadPoolExecutor(1, f"decode-{work}", torch.set_num_threads, (config.threads,))
            for work in ("compute", "handoff")
        ]
        self._receiver = receiver(handoff, self._runner.cache, self._threads[1])
        self._scheduler = DecodeScheduler(
            self._runner, self._threads[0], self._before_first, config, model.eos_ids, clock
        )
        self._requests: dict[str, DecodeRequest] = {}
        self._queue = ReserveQueue(self._take, self._expected_wait, config.max_wait_s, wall, clock)
        self._holds = HoldTime()
        self._serials = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._receiving: set[asyncio.Task[int]] = set()
        self._unavailable = _STARTING

    async def start(self) -> None:
        """Take requests from now on, after the warm-up that the configuration asks for."""
        if self._config.warm_up:
            tokens = min(self._model.positions, self._config.cache_tokens)
            await asyncio.get_running_loop().run_in_executor(
                self._threads[0], warm_up, self._runner, tokens, self._plan.calibrated
            )
        if self._unavailable == _STARTING:
            self._unavailable = ""
            self._tasks = [asyncio.create_task(self._scheduler.run()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """End every request and session, wait for what is being computed, and stop."""
        self._unavailable = _CLOSING
        self._queue.clear(_CLOSING)
        for request in list(self._requests.values()):
            request.close(FinishReason.CANCELLED, _CLOSING)
        self._pages.sessions.clear()
        self._scheduler.stop()
        await asyncio.gather(*self._tasks[:1], return_exceptions=True)
        others = [*self._tasks[1:], *self._receiving]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for thread in self._threads:
            thread.shutdown()

    @property
    def fault(self) -> str:
        """Why the worker should be replaced; empty while it is well."""
        if any(task.done() for task in self._tasks):
            return "the decode loop has stopped"
        return self._scheduler.fault

    @property
    def pages_used(self) -> int:
        return self._pages.pool.used

    async def stats(self) -> DecodeStats:
        """Raises DecodeFailed while the worker takes no requests, so that no door counts on it."""
        self._check_available()
        pool, running = self._pages.pool, self._scheduler.running
        waiting = max(0, sum(request.ended is None for request in self._requests.values()) - running)
        waiting += len(self._queue)
        sessions = len(self._pages.sessions)
        return DecodeStats(
            self.name, pool.total, pool.free, running, waiting, sessions, uses=tuple(self._uses())
        )

    def _uses(self) -> Iterator[OwnerUse]:
        requests: Counter[tuple[str, str]] = Counter()
        tokens: Counter[tuple[str, str]] = Counter()
        for request in self._requests.values():
            if request.ended is None:
                order = request.order
                requests[order.owner, order.door] += 1
                tokens[order.owner, order.door] += order.prompt_tokens + order.max_tokens
        for owner, held in self._pages.sessions.held():
            tokens[owner, ""] += held
        for (owner, door), held in tokens.items():
            yield OwnerUse(owner, door, requests[owner, door], held)

    async def reserve(self, order: Reserve) -> Reserved | Refused:
        """Take pages for a request, or wait for them if it asks for that. ValueError for counts that make no
        sense (the door checks them), and DecodeFailed while the worker takes no requests or when it is
        cancelled while it waits."""
        self._check_available()
        if self._live(order.request_id) is not None or order.request_id in self._queue:
            return Refused(RefusalReason.DUPLICATE, f"a request {order.request_id} is already here")
        if order.page_selection:
            try:
                self._plan.selects_pages(order.page_selection, self._config.page_selection)
            except PageSelectionError as error:
                return Refused(RefusalReason.SELECTION, str(error))
        return await self._queue.reserve(order)

    def _take(self, order: Reserve, behind: int) -> Reserved | Refused:
        """The request is here from now on, if its pages are."""
        holding = self._pages.reserve(order, self._wall(), behind)
        if isinstance(holding, Refused):
            return holding
        began = self._clock()

        def freed() -> None:
            self._receiver.release(order.request_id)
            self._holds.ended(self._clock() - began)

        holding.on_free = freed
        expected = order.prompt_tokens if order.session_id is None else 0
        self._requests[order.request_id] = DecodeRequest(
            serial=next(self._serials),
            order=order,
            holding=holding,
            arrival=KVArrival(self._model.layers, expected),
            reserved=began,
            renewed=began,
            length=holding.session_tokens + expected,
        )
        return Reserved(len(holding.table) + len(holding.spare), holding.session_tokens)

    def _pages_came_back(self) -> None:
        """Not in the middle of whatever gave them back."""
        if self._queue:
            asyncio.get_running_loop().call_soon(self._queue.serve)

    def _expected_wait(self, pages: int, ahead: Sequence[int]) -> float | None:
        """Seconds until so many pages are there behind those `ahead`; None until a request has ended here."""
        hold = self._holds.mean
        if hold is None:
            return None
        now, free = self._clock(), self._pages.pool.free
        holders = self._pages.sessions.leases(self._wall())
        for request in self._requests.values():
            own = len(request.holding.table) + len(request.holding.spare)
            own -= request.holding.session_tokens // PAGE_TOKENS
            holders.append((self._holds.left(now - request.reserved), own))
        return seconds_until_room(pages, free, holders, ahead, hold)

    async def announce(self, announcement: KVAnnouncement) -> None:
        """Receive K/V into pages. Ignored for requests that are not here and for exact repetitions.

        A failed or contradictory announcement ends its request as failed, so that no answer is ever computed
        from incomplete K/V, and is raised, so that the sending stage stops as well: HandoffError, and
        ArrivalError for K/V that the request does not have.
        """
        request = self._live(announcement.request_id)
        if request is None:
            return
        began = self._clock()
        tokens, first = announcement.tokens, announcement.layer
        try:
            layers = range(first, first + announcement.layers)
            new = [layer for layer in layers if request.arrival.claim(layer, announcement.start, tokens)]
            if not new:
                return
            receiving = asyncio.create_task(self._receiver.receive(announcement, new, request.holding.hold))
            self._receiving.add(receiving)
            receiving.add_done_callback(self._receiving.discard)
            moved = await asyncio.shield(receiving)  # a caller that gives up must not stop a write half way
        except Exception as error:
            self._not_arrived(request, error)
            raise
        if moved:
            request.times.handoff_bytes += moved
            request.times.handoff_seconds += self._clock() - began
            request.arrival.written(tokens * len(new))
            if request.arrival.complete and request.ended is None:
                request.times.complete = self._clock()
                request.settled.set()
                self._submit_if_ready(request)

    async def first_logits(self, message: FirstLogits) -> None:
        """Ignored for requests that are not here and for repetitions. Raises ArrivalError for logits that
        the request cannot use."""
        request = self._live(message.request_id)
        if request is None or request.times.logits is not None:
            return
        logits_V = np.asarray(message.logits, dtype=np.float32)
        if request.order.session_id is not None or logits_V.shape != (self._model.vocab,):
            error = ArrivalError(f"unexpected logits {logits_V.shape}; the vocabulary is {self._model.vocab}")
            self._not_arrived(request, error)
            raise error
        request.logits = logits_V
        request.times.logits = self._clock()
        self._submit_if_ready(request)

    async def generate(self, job: GenerateJob) -> AsyncGenerator[DecodeEvent, None]:
        """FirstTokenTimings and Tokens, then exactly one FinishEvent, whatever happens.

        A caller that stops reading cancels the request.
        """
        request = self._requests.get(job.request_id)
        if request is None or request.job is not None:
            why = "is not reserved here, or was cancelled" if request is None else "is already generating"
            message = f"request {job.request_id} {why}"
            yield FinishEvent(job.request_id, FinishReason.FAILED, 0, DecodeReport(), message)
            return
        try:
            self._begin(request, job)
            while True:
                event = await request.events.get()
                if isinstance(event, FinishEvent):
                    await request.holding.freed.wait()  # who hears the end finds the pages free
                    yield event
                    return
                yield event
        finally:
            request.close(FinishReason.CANCELLED, "the caller stopped reading")
            if request.kept is None:  # otherwise its door must say first that it has heard of the session
                self._forget(request)

    def _begin(self, request: DecodeRequest, job: GenerateJob) -> None:
        request.job, request.renewed = job, self._clock()
        request.deadline, request.times.job = job.deadline, self._clock()
        if request.ended is not None:  # it failed before anybody listened
            request.tell_end()
            return
        try:
            request.append_ids = appended_ids(request.order, job, self._model.vocab)
            request.selects_pages = self._plan.selects_pages(job.page_selection, self._config.page_selection)
            if not 0 <= job.keep_tokens <= request.prompt_tokens:
                raise ValueError(f"keep_tokens {job.keep_tokens} is not within {request.prompt_tokens}")
            self._pages.prepare_keep(request.holding, job.keep_tokens)
        except (ValueError, OutOfPages) as error:
            request.close(FinishReason.FAILED, str(error))
            return
        self._submit_if_ready(request)

    def _submit_if_ready(self, request: DecodeRequest) -> None:
        if request.ready:
            self._scheduler.submit(request)

    def _before_first(self, request: DecodeRequest) -> None:
        """Keep the session that was asked for, and report what the first token took."""
        job, session = request.job, None
        if job is not None and job.keep_tokens > 0:
            owner = request.order.owner
            kept = self._pages.keep(
                request.holding, job.keep_tokens, owner, job.keep_ttl_s, self._wall(), job.chain
            )
            request.kept, session = kept, kept.told
        request.events.put_nowait(FirstTokenTimings(request.request_id, request.times.report(), session))

    async def keep(self, job: KeepSession) -> SessionKept | Refused:
        """Turn a prefilled request into a session once all its K/V is here.

        Raises DecodeFailed if it cannot come any more; Refused for an unknown or cancelled request and for
        a passed deadline.
        """
        request = self._requests.get(job.request_id)
        missing = Refused(RefusalReason.NO_SESSION, f"request {job.request_id} is not reserved here")
        if request is None or request.job is not None or request.order.session_id is not None:
            return missing
        request.renewed, request.deadline = self._clock(), job.deadline
        request.times.job = self._clock()
        await request.settled.wait()
        self._forget(request)
        if request.ended is not None:
            reason, message = request.ended
            if reason is FinishReason.FAILED:
                raise DecodeFailed(message)
            expired = reason is FinishReason.DEADLINE
            return Refused(RefusalReason.DEADLINE, message) if expired else missing
        tokens, owner = request.order.prompt_tokens, request.order.owner
        session = self._pages.hand_over(request.holding, tokens, owner, job.ttl_s, self._wall(), job.chain)
        request.close(FinishReason.STOP, "")
        report = request.times.report()
        return SessionKept(job.request_id, session.told, report)

    async def cancel(self, request_id: str) -> None:
        """End a request; returns when its pages are free (a session that was kept from it stays)."""
        self._queue.cancel(request_id)
        request = self._requests.get(request_id)
        if request is not None:
            request.close(FinishReason.CANCELLED, "cancelled")
            self._forget(request)
            await request.holding.freed.wait()

    async def find_prefix(self, owner: str, chain: bytes) -> Prefix | None:
        return self._pages.sessions.longest_prefix(owner, chain, self._wall())

    async def release_session(self, session_id: str, owner: str) -> bool:
        return self._pages.sessions.release(session_id, owner, self._wall())

    async def renew(self, request_ids: Iterable[str]) -> None:
        """Their door is still there; unknown ids are fine. It knows of a session whose request has ended."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            request.renewed = self._clock()
            if request.kept is not None and request.ended is not None:
                self._forget(request)
        self._queue.renew(request_ids)

    async def _watch(self) -> None:
        while True:
            self._expire()
            await asyncio.sleep(_TICK_S)

    def _expire(self) -> None:
        """End sessions past their lease, and requests past their deadline or not renewed."""
        wall, now = self._wall(), self._clock()
        self._pages.sessions.expire(wall)
        self._queue.expire(self._config.stream_lease_s)
        for request in list(self._requests.values()):
            late = now - request.renewed > self._config.stream_lease_s
            request.overdue = request.overdue + 1 if late else 0
            if request.overdue > _OVERDUE_TICKS:
                self._abandon(request)
            elif request.deadline is not None and wall >= request.deadline:
                request.close(FinishReason.DEADLINE, "the deadline passed")

    def _abandon(self, request: DecodeRequest) -> None:
        """End what no door waits for any more, the session that its client was to be told of included."""
        request.close(FinishReason.CANCELLED, "nobody renewed the request")
        if request.kept is not None:
            self._pages.sessions.release(request.kept.session_id, request.kept.owner, self._wall())
        self._forget(request)

    def _live(self, request_id: str) -> DecodeRequest | None:
        """A request that is here and has not ended."""
        request = self._requests.get(request_id)
        return None if request is None or request.ended is not None else request

    def _forget(self, request: DecodeRequest) -> None:
        """Drop an ended request, which stays known until its caller has heard why. By then another one may
        have taken its id."""
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]

    def _check_available(self) -> None:
        if self._unavailable:
            raise DecodeFailed(self._unavailable)

    @staticmethod
    def _not_arrived(request: DecodeRequest, error: Exception) -> None:
        request.close(FinishReason.FAILED, f"the prompt's K/V did not arrive: {error}")


def load_engine(
    name: str,
    model: ModelSpec,
    config: DecodeConfig,
    handoff: HandoffConfig = HandoffConfig(),  # noqa: B008
) -> DecodeEngine:
    """An engine that is loaded but not started. Sets this process's torch threads.

    Raises ModelError for a model that cannot be loaded, PageSelectionError or ValueError for a configuration
    that does not fit it.
    """
    torch.set_num_threads(config.threads)
    return DecodeEngine(name, load_model(model, config.device), config, handoff)
