"""The engine of a decode worker. It does not import Ray.

The event loop's thread does all bookkeeping. A compute thread runs the tensor work of `scheduler` and
`runner`, and a hand-off thread writes received KV. Cancelling or renewing a request therefore waits for
neither thread.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress

import numpy as np

from deltafront.workers.decode.decode_attention import PageSelectionError, plan_layers
from deltafront.workers.decode.ranks import (
    LeadRunner,
    ReaderMaker,
    join_ranks,
    make_threads,
    runner_sizes,
)
from deltafront.workers.decode.reads import appended_ids, prompt_ids
from deltafront.workers.decode.receiver import HandoffReceiver
from deltafront.workers.decode.request import DecodeEvent, DecodeRequest, failed
from deltafront.workers.decode.request_table import DecodeRequests
from deltafront.workers.decode.runner import warm_up
from deltafront.workers.decode.scheduler import DecodeScheduler
from deltafront.workers.decode.tiers import Tiers
from deltafront.workers.kv.handoff.mapped import MappedReader
from deltafront.workers.kv.host_memory import RanksMemory, make_host_memory, page_bytes, pages_of
from deltafront.workers.kv.pages.leases import Lease
from deltafront.workers.kv.pages.pool import OutOfPages
from deltafront.workers.kv.pages.state_slots import OutOfSlots
from deltafront.workers.kv.peer_memory import ExportedObjects, export_objects
from deltafront.workers.messages.events import (
    FinishEvent,
    FinishReason,
    FirstTokenTimings,
    Prefix,
    SessionKept,
)
from deltafront.workers.messages.prompts import PromptKey
from deltafront.workers.messages.requests import (
    DecodeFailed,
    GenerateJob,
    KeepSession,
    RefusalReason,
    Refused,
    Reservation,
    Reserved,
)
from deltafront.workers.messages.stages import Rendezvous
from deltafront.workers.messages.states import DecodeStats
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.grammars import GrammarError, Grammars, GrammarState
from deltafront.workers.roles import Rank
from deltafront.workers.settings import DecodeConfig
from deltafront.workers.tracing import NO_TRACER, Tracer
from deltafront.workers.waits import said_when_slow

_TICK_S = 0.1
_GAP_MS, _CROWDED_GAP_MS = 30.0, 45.0
"""`target_gap_ms` where a stage shares the worker's GPU: while one prompt is being prefilled, and several."""
_STARTING = "the decode worker is still starting"
_CLOSING = "the decode worker is shutting down"


class DecodeEngine:
    """Serves the requests of one decode worker. Call `start` before the first request, and `close` at the
    end.

    Args:
        name: The actor's name (`decode:<id>`).
        stack: Rank 0's part of the model.
        ranks: The other tensor-parallel ranks.
        digest: The model's content digest, which is part of the names of KV files.
        grammars: Compiles the grammars of requests; None: requests with a grammar fail.
        wall: Returns seconds since the epoch.
    Raises:
        PageSelectionError, ValueError: The configuration does not fit the model.
    """

    def __init__(
        self,
        name: str,
        stack: LayerStack,
        config: DecodeConfig,
        *,
        reader: ReaderMaker,
        ranks: Sequence[Rank] = (),
        digest: str = "",
        grammars: Grammars | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.perf_counter,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        model = stack.config
        self.name = name
        self._config = config
        self._model = model
        self._grammars = grammars
        self._wall = wall
        self._clock = clock
        self._tracer = tracer
        self._plan = plan_layers(config, model.layers, model.windows, model.linear_layers)
        self._requests = DecodeRequests(name, config, model, self._kv_changed, wall, clock)
        self._manager = self._requests.manager
        self._stack, self._ranks = stack, ranks
        self._runner = LeadRunner(stack, self._plan, ranks, **runner_sizes(config, model))
        self._threads = make_threads(config)
        own = reader(self._runner.cache, self._threads[1])
        self._receiver = HandoffReceiver(self._requests, self._runner, own, self._threads[1], model, clock)
        self.announce, self.first_logits = self._receiver.announce, self._receiver.first_logits
        self.open_pages, self.close_pages = self._receiver.open_pages, self._receiver.close_pages
        self.kv, self.state = self._receiver.kv, self._receiver.state
        self.held_state = self._receiver.held_state
        memory = make_host_memory(self._runner.cache, config, digest)
        self._tiers: Tiers | None = None
        in_place = isinstance(own, MappedReader)
        if memory is not None:
            on_ranks = RanksMemory(memory, self._threads[1], ranks, self._runner.lose)
            room = pages_of(config.store_gib, self._runner.cache)
            self._tiers = Tiers(self._requests, on_ranks, room, clock, in_place=in_place)
        self._scheduler = DecodeScheduler(
            self._runner,
            self._threads[0],
            self._before_first,
            config,
            model.eos_ids,
            clock,
            gap_s=lambda: target_gap_s(config, in_place, self._requests.unended - self._scheduler.submitted),
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._unavailable = _STARTING

    def exported_memory(self) -> ExportedObjects:
        """Export the weights (`LayerStack`) and the KV cache (`PagedKVCache`), so that a prefill stage on the
        same GPU can map them."""
        return export_objects((self._stack, self._runner.cache), self._stack.device)

    def join(self, rendezvous: Rendezvous) -> None:
        """Link rank 0 to the other ranks. Call it before `start`."""
        join_ranks(self._stack, rendezvous)

    async def start(self) -> None:
        if self._config.warm_up:
            tokens = min(self._model.positions, self._config.cache_tokens)
            await asyncio.get_running_loop().run_in_executor(
                self._threads[0], warm_up, self._runner, tokens, self._plan.calibrated
            )
        if self._unavailable == _STARTING:
            self._unavailable = ""
            work = [self._scheduler.run(), self._watch()]
            work += [] if self._tiers is None else self._tiers.runs()
            self._tasks = [asyncio.create_task(one) for one in work]

    async def close(self) -> None:
        """End every request and session, and wait for running computation."""
        self._unavailable = _CLOSING
        self._requests.close(_CLOSING)
        self._scheduler.stop()
        with self._closing("what it computes"):
            await asyncio.gather(*self._tasks[:1], return_exceptions=True)
        for task in self._tasks[1:]:
            task.cancel()
        with self._closing("copies to host memory and disk"):
            await asyncio.gather(*self._tasks[1:], return_exceptions=True)
        with self._closing("KV that is being received"):
            await self._receiver.close()  # later writes do no harm: no other request gets these pages
        if self._tiers is not None:
            with self._closing("KV that is being loaded from disk"):
                await self._tiers.close()
        with self._closing("its threads"):
            for thread in self._threads:
                thread.shutdown()

    def _closing(self, left: str) -> AbstractContextManager[None]:
        return said_when_slow(lambda: f"{left}, to close {self.name}")

    @property
    def fault(self) -> str:
        """The reason to replace the worker; empty while the worker works."""
        if any(task.done() for task in self._tasks):
            return "the decode loop has stopped"
        return self._scheduler.fault or self._runner.fault

    async def stats(self) -> DecodeStats:
        self._check_available()
        pool, running = self._manager.pool, self._scheduler.running
        slots = self._manager.states
        waiting = max(0, self._requests.unended - running) + len(self._requests.queue)
        return DecodeStats(
            name=self.name,
            pages_total=pool.total,
            pages_free=pool.free,
            running=running,
            waiting=waiting,
            sessions=len(self._manager.leases),
            append_tokens_per_second=self._scheduler.appended.tokens_per_second,
            pages_remembered=len(pool.prefix_cache),
            pages_evicted=pool.prefix_cache.evicted,
            pages_evicted_retained=pool.prefix_cache.evicted_retained,
            page_bytes=page_bytes(self._runner.cache.sides) * (1 + len(self._ranks)),
            evicted_age_s=pool.prefix_cache.evicted_age_s,
            state_slots=0 if slots is None else slots.total,
            state_slots_free=0 if slots is None else slots.free,
            states_evicted=0 if slots is None else slots.evicted,
            tiers=() if self._tiers is None else self._tiers.stats(),
            decoding=self._scheduler.submitted,
            uses=tuple(self._requests.uses()),
        )

    async def reserve(self, reservation: Reservation) -> Reserved | Refused:
        """Reserve pages for a request. Waits for free pages if `reservation.wait` is set.

        Raises:
            ValueError: The reservation's token counts contradict one another.
            DecodeFailed: The worker takes no requests, or the request was cancelled while it waited.
        """
        self._check_available()
        selection = reservation.options.page_selection
        if selection:
            try:
                self._plan.selects_pages(selection, self._config.page_selection)
            except PageSelectionError as error:
                return Refused(reason=RefusalReason.SELECTION, message=str(error))
        if self._tiers is not None:
            return await self._tiers.reserve(reservation)
        return await self._requests.reserve(reservation)

    def _kv_changed(self, request: DecodeRequest) -> None:
        self._scheduler.wake()
        request.kv_changed(self._clock())
        self._submit_if_ready(request)

    async def resume(self, request_id: str, points: Sequence[int], attempt: int) -> int:
        """Begin the next attempt at a prompt (`DecodeWorker.resume`).

        Waits until the previous attempt's running writes into the pages have ended. KV that the previous
        attempt sends later is dropped, so that it cannot overwrite KV of the next attempt.
        """
        self._check_available()
        await self._requests.being_read(request_id).pages.unused()
        request = self._requests.being_read(request_id)  # it may have ended meanwhile
        return request.resume(points, attempt, self._clock())

    async def generate(self, job: GenerateJob) -> AsyncGenerator[DecodeEvent, None]:
        grammar = await self._grammar(job)
        request = self._requests.find(job.request_id)
        if request is None or request.job is not None:
            why = "is not reserved here, or was cancelled" if request is None else "is already generating"
            yield failed(job.request_id, f"request {job.request_id} {why}")
            return
        try:
            self._begin(request, job, grammar)
            while True:
                event = await request.events.get()
                if isinstance(event, FinishEvent):
                    await request.pages.freed.wait()  # once the caller gets this event, the pages are free
                    yield event
                    return
                yield event
        finally:
            request.close(FinishReason.CANCELLED, "the caller stopped reading")
            if request.session is None:  # else until the API server confirms the session, by `renew`
                self._requests.forget(request)

    async def _grammar(self, job: GenerateJob) -> GrammarState | GrammarError | None:
        """Compile a request's grammar in a thread, and advance it over the tokens of a resumed answer."""
        request = self._requests.find(job.request_id)
        if request is None or not request.options.constraint:
            return None
        if self._grammars is None:
            return GrammarError("this worker has no tokenizer, so answers can follow no grammar")
        answered = np.frombuffer(job.extend_ids, "<u4").tolist() if job.answered_tokens else []
        try:
            return await asyncio.to_thread(
                self._grammars.begin, request.options.constraint, answered[-job.answered_tokens :]
            )
        except GrammarError as error:
            return error

    def _begin(
        self, request: DecodeRequest, job: GenerateJob, grammar: GrammarState | GrammarError | None
    ) -> None:
        self._take_up(request, "decode")
        request.begin(job)
        if request.ended is not None:
            return
        try:
            if isinstance(grammar, GrammarError):
                raise grammar
            request.grammar = grammar
            extend_ids = appended_ids(request.reservation, job, self._model.vocab)
            known = prompt_ids(request.reservation, job.prompt_ids, self._model.vocab)
            request.known_ids.frombytes(known or request.pages.session_token_ids)
            request.plan_reads(extend_ids, self._config.append_chunk_tokens)
            request.note_answer(self._model.eos_ids)
            default = self._config.page_selection
            request.selects_pages = self._plan.selects_pages(request.options.page_selection, default)
            if not 0 <= job.keep_tokens <= request.prompt_tokens:
                raise ValueError(f"keep_tokens {job.keep_tokens} is not within {request.prompt_tokens}")
            self._manager.prepare_session(request.pages, job.keep_tokens)
        except (ValueError, OutOfPages, OutOfSlots) as error:
            request.close(FinishReason.FAILED, str(error))
            return
        self._submit_if_ready(request)

    def _take_up(self, request: DecodeRequest, span: str) -> None:
        """Record that the request's caller now waits for events: set lease, deadline and trace span."""
        now, options = self._clock(), request.options
        request.renewed, request.deadline, request.times.job = now, options.deadline, now
        request.span = self._tracer.begin(span, options.trace, self._clock, now)

    def _submit_if_ready(self, request: DecodeRequest) -> None:
        if request.ready:
            request.logits = request.inbox.logits_V
            self._scheduler.submit(request)

    def _before_first(self, request: DecodeRequest) -> None:
        job, session = request.job, None
        if job is not None and job.keep_tokens > 0:
            request.session = self._keep(request, job.keep_tokens, request.known_ids.tobytes())
            session = request.session.message
        request.events.put_nowait(
            FirstTokenTimings(request_id=request.request_id, report=request.times.report(), session=session)
        )

    async def keep(self, job: KeepSession) -> SessionKept | Refused:
        request = self._requests.find(job.request_id)
        missing = Refused(
            reason=RefusalReason.NO_SESSION, message=f"request {job.request_id} is not reserved here"
        )
        if request is None or request.job is not None or request.reservation.reads:
            return missing
        ids = prompt_ids(request.reservation, job.prompt_ids, self._model.vocab)
        self._take_up(request, "keep")
        await request.settled()
        with suppress(DecodeFailed):  # the request has then ended, which is handled below
            await request.pages.come()
        if request.inbox.lost:
            request.close(FinishReason.NO_KV, request.inbox.lost)
        if request.ended is not None:
            request.end_span()
        self._requests.forget(request)
        if request.ended is not None:
            return request.refusal() or missing
        session = self._keep(request, request.prompt_tokens, ids)
        request.close(FinishReason.STOP, "")
        report = request.times.report()
        return SessionKept(request_id=job.request_id, session=session.message, report=report)

    def _keep(self, request: DecodeRequest, tokens: int, ids: bytes) -> Lease:
        """Keep the request's first `tokens` tokens as a session."""
        owner, ttl_s = request.reservation.owner, request.options.keep_ttl_s
        return self._manager.keep_session(request.pages, tokens, owner, ttl_s, self._wall(), token_ids=ids)

    async def cancel(self, request_id: str) -> None:
        self._requests.queue.cancel(request_id)
        if self._tiers is not None:
            self._tiers.cancel(request_id)
        request = self._requests.find(request_id)
        if request is not None:
            request.close(FinishReason.CANCELLED, "cancelled")
            self._requests.forget(request)
            await request.pages.freed.wait()

    async def find_prefix(self, key: PromptKey) -> Prefix | None:
        if self._tiers is not None:
            return self._tiers.find(key)
        return self._manager.prefix(key)

    async def release_session(self, session_id: str, owner: str) -> bool:
        return self._manager.leases.release(session_id, owner, self._wall())

    async def renew(self, request_ids: Iterable[str]) -> None:
        self._requests.renew(request_ids)

    async def _watch(self) -> None:
        while True:
            self._requests.expire()
            await asyncio.sleep(_TICK_S)

    def _check_available(self) -> None:
        why = self._unavailable or self.fault
        if why:
            raise DecodeFailed(why)


def target_gap_s(config: DecodeConfig, shared: bool, prompts: int) -> float:
    """Return the fewest seconds between the starts of two decode steps; 0: none.

    Args:
        shared: A prefill stage uses the worker's GPU.
        prompts: The number of prompts that are being prefilled for this worker, or wait for that.
    """
    if prompts <= 0:
        return 0.0
    gap_ms = config.target_gap_ms
    if gap_ms is None:
        gap_ms = (_GAP_MS if prompts == 1 else _CROWDED_GAP_MS) if shared else 0.0
    return gap_ms / 1000
