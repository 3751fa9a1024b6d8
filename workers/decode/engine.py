"""A decode worker without Ray: receives K/V, keeps sessions, decodes with continuous batching.

The asyncio methods below run on the event loop's thread, which owns all bookkeeping. Tensors are computed
on a compute thread (`decode_scheduler`) and received K/V is written on a hand-off thread
(`decode_handoff`), so that renewing and cancelling never wait for either.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from ..kv.arrival import KVArrival
from ..kv.cache import PagedKVCache
from ..kv.page_pool import PAGE_TOKENS, OutOfPages, PagePool
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
    RefusalReason,
    Refused,
    Reserve,
    Reserved,
    SessionKept,
)
from ..model.decoder import LayerStack
from ..settings import DecodeConfig
from ..warm_up import warm_up_decode
from .handoff import Handoff, Receiver
from .lifecycle import Lifecycle
from .page_selection import SelectionError, plan_layers
from .pages import DecodePages
from .request import DecodeRequest, Event, appended_ids, check_counts
from .runner import DecodeCompute
from .scheduler import DecodeScheduler
from .sessions import SessionsTable

_TICK_S = 0.1
"""How often deadlines and leases are looked at."""


class DecodeEngine:
    """One worker: construct it, `await start()`, and `await close()` at the end.

    name: the actor's name (`decode:<id>`); session ids begin with its id. wall: seconds since the epoch.
    Raises SelectionError or ValueError for a configuration that does not fit the model.
    """

    def __init__(
        self,
        name: str,
        stack: LayerStack,
        config: DecodeConfig,
        receiver: Receiver,
        wall: Callable[[], float] = time.time,
    ) -> None:
        model = stack.config
        self.name = name
        self._config = config
        self._model = model
        self._wall = wall
        self._plan = plan_layers(config, model.layers)
        pool = PagePool(config.cache_tokens // PAGE_TOKENS)
        cache = PagedKVCache(
            range(model.layers), model.kv_heads, model.head_dim, pool.total, stack.dtype, stack.device
        )
        compute = DecodeCompute(stack, cache, self._plan)
        sessions = SessionsTable(name.removeprefix(DECODE_PREFIX), pool, config.max_session_ttl_s)
        self._compute = compute
        self._pages = DecodePages(pool, sessions, model.positions, compute.copy_page)
        self._lifecycle = Lifecycle(self._pages, config.stream_lease_s, wall)
        self._threads = [
            ThreadPoolExecutor(1, f"decode-{work}", torch.set_num_threads, (config.threads,))
            for work in ("compute", "handoff")
        ]
        self._scheduler = DecodeScheduler(
            compute,
            self._threads[0],
            self._lifecycle,
            self._before_first,
            max_batch=config.max_batch,
            chunk_tokens=config.append_chunk_tokens,
            eos_ids=model.eos_ids,
        )
        self._handoff = Handoff(
            model, receiver, compute, self._threads[1], self._lifecycle, self._submit_if_ready
        )
        self._serials = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take requests from now on, after the warm-up that the configuration asks for."""
        if self._config.warm_up:
            tokens = min(self._model.positions, self._config.cache_tokens)
            await asyncio.get_running_loop().run_in_executor(
                self._threads[0], warm_up_decode, self._compute, tokens, self._plan.calibrated
            )
        self._tasks = [asyncio.create_task(self._scheduler.run()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """End every request and session, wait for what is being computed, and stop."""
        self._lifecycle.close_all(FinishReason.CANCELLED, "the decode worker is shutting down")
        self._pages.sessions.clear()
        self._scheduler.stop()
        running, watching = self._tasks
        await running
        watching.cancel()
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
        pool, running = self._pages.pool, self._scheduler.running
        waiting = max(0, self._lifecycle.live_count() - running)
        return DecodeStats(self.name, pool.total, pool.free, running, waiting, len(self._pages.sessions))

    async def reserve(self, order: Reserve) -> Reserved | Refused:
        """Take pages for a request. ValueError for counts that make no sense (the door checks them)."""
        check_counts(order)
        if self._lifecycle.live(order.request_id) is not None:
            return Refused(RefusalReason.DUPLICATE, f"a request {order.request_id} is already here")
        if order.page_selection:
            try:
                self._plan.wants_delta(order.page_selection, self._config.page_selection)
            except SelectionError as error:
                return Refused(RefusalReason.SELECTION, str(error))
        holding = self._pages.reserve(order, self._wall())
        if isinstance(holding, Refused):
            return holding
        expected = order.prompt_tokens if order.session_id is None else 0
        request = DecodeRequest(
            serial=next(self._serials),
            order=order,
            holding=holding,
            arrival=KVArrival(self._model.layers, expected),
            renewed=time.monotonic(),
            length=holding.session_tokens + expected,
        )
        self._lifecycle.add(request)
        return Reserved(len(holding.all_pages), holding.session_tokens)

    async def announce(self, announcement: KVAnnouncement) -> None:
        await self._handoff.announce(announcement)

    async def first_logits(self, message: FirstLogits) -> None:
        await self._handoff.first_logits(message)

    async def generate(self, job: GenerateJob) -> AsyncGenerator[Event, None]:
        """FirstTokenTimings and TokenEvents, then exactly one FinishEvent, whatever happens.

        A caller that stops reading cancels the request.
        """
        request = self._lifecycle.known(job.request_id)
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
                    await request.freed.wait()  # who hears the end finds the pages free
                    yield event
                    return
                yield event
        finally:
            self._lifecycle.close(request, FinishReason.CANCELLED, "the caller stopped reading")
            self._lifecycle.forget(request)

    def _begin(self, request: DecodeRequest, job: GenerateJob) -> None:
        request.job, request.renewed = job, time.monotonic()
        request.deadline, request.times.job = job.deadline, time.perf_counter()
        if request.ended is not None:  # it failed before anybody listened
            request.events.put_nowait(request.finish(*request.ended))
            return
        try:
            request.append_ids = appended_ids(request.order, job, self._model.vocab)
            request.delta = self._plan.wants_delta(job.page_selection, self._config.page_selection)
            if not 0 <= job.keep_tokens <= request.prompt_tokens:
                raise ValueError(f"keep_tokens {job.keep_tokens} is not within {request.prompt_tokens}")
            self._pages.ensure_spare(request.holding, job.keep_tokens)
        except (ValueError, OutOfPages) as error:
            self._lifecycle.close(request, FinishReason.FAILED, str(error))
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
            kept = self._pages.keep(request.holding, job.keep_tokens, owner, job.keep_ttl_s, self._wall())
            session = kept.told
        request.events.put_nowait(FirstTokenTimings(request.request_id, request.times.report(), session))

    async def keep(self, job: KeepSession) -> SessionKept | Refused:
        """Turn a prefilled request into a session once all its K/V is here.

        Raises DecodeFailed if it cannot come any more; Refused for an unknown or cancelled request and for
        a passed deadline.
        """
        request = self._lifecycle.known(job.request_id)
        missing = Refused(RefusalReason.NO_SESSION, f"request {job.request_id} is not reserved here")
        if request is None or request.job is not None or request.order.session_id is not None:
            return missing
        request.renewed, request.deadline = time.monotonic(), job.deadline
        request.times.job = time.perf_counter()
        await request.settled.wait()
        self._lifecycle.forget(request)
        if request.ended is not None:
            reason, message = request.ended
            if reason is FinishReason.FAILED:
                raise DecodeFailed(message)
            expired = reason is FinishReason.DEADLINE
            return Refused(RefusalReason.DEADLINE, message) if expired else missing
        tokens, owner = request.order.prompt_tokens, request.order.owner
        session = self._pages.hand_over(request.holding, tokens, owner, job.ttl_s, self._wall())
        self._lifecycle.close(request, FinishReason.STOP, "")
        report = request.times.report()
        return SessionKept(job.request_id, session.told, report)

    async def cancel(self, request_id: str) -> None:
        """End a request; returns when its pages are free (a session that was kept from it stays)."""
        request = self._lifecycle.known(request_id)
        if request is not None:
            self._lifecycle.close(request, FinishReason.CANCELLED, "cancelled")
            self._lifecycle.forget(request)
            await request.freed.wait()

    async def release_session(self, session_id: str, owner: str) -> bool:
        return self._pages.sessions.release(session_id, owner, self._wall())

    async def renew(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._lifecycle.renew(request_id)

    async def _watch(self) -> None:
        while True:
            self._lifecycle.expire()
            await asyncio.sleep(_TICK_S)
