"""One Prefill request, from ids to a session."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from ...workers.messages.events import (
    DecodeReport,
    FinishEvent,
    FinishReason,
    FirstTokenTimings,
    Session,
    SessionKept,
    Usage,
)
from ...workers.messages.requests import (
    GenerateJob,
    KeepSession,
    RefusalReason,
    Refused,
    Reservation,
    Sampling,
)
from ...workers.roles import DecodeWorker
from ..errors import DeadlineExceeded, WorkerError, WorkerFailed
from .answers import PrefillFinished, density_of, timings_of
from .attempt import Attempt, Emit, Forward, Replays, Resources, tokenize
from .callers import Share
from .calls import PrefillCall, Prompt
from .placement import place, refusal, reserve
from .plan import Plan, plan_session
from .prefix import FoundPrefix, chain_of, find
from .reading import Reading
from .texts import Held
from .timings import TtftClock, decode_parts


class Prefilling:
    """Reads a prompt and keeps its K/V on a decode worker."""

    def __init__(
        self,
        resources: Resources,
        call: PrefillCall,
        clock: TtftClock,
        emit: Emit,
        share: Share,
        held: Held,
    ) -> None:
        self._held = held
        self._share = share
        self._resources = resources
        self._call = call
        self._clock = clock
        self._emit = emit
        self._replays = Replays(resources, clock, lambda: False)
        self._progress = Forward(emit)
        self._prompt = self._chain = b""

    async def run(self) -> None:
        """Emit Progress …, PrefillFinished. Raises DeltafrontError."""
        held, resources = self._held, self._resources
        self._prompt = await tokenize(resources, held, self._call.prompt, follows=False, answer=False)
        self._call = replace(self._call, prompt=Prompt())  # text is not kept beside its ids
        held.release()
        self._clock.lap("tokenize")
        call, model = self._call, self._resources.model
        if self._resources.settings.prefix_reuse:
            self._chain = await asyncio.to_thread(
                chain_of, self._prompt, call.owner, model, call.method, call.cache_salt
            )
        await self._replays.run(self._once)

    async def _once(self) -> None:
        call, clock, metrics = self._call, self._clock, self._resources.metrics
        plan = plan_session(self._prompt, self._resources.positions)
        if await self._from_prefix(plan):
            return
        await self._share.take(plan.read_tokens)
        with Attempt(self._resources.fleet, self._share) as attempt:
            reservation = Reservation(
                attempt.request_id,
                call.owner,
                plan.read_tokens,
                plan.max_tokens,
                door=self._resources.door,
                deadline=call.deadline,
            )
            placed = await place(self._resources, attempt, plan, reservation, clock.lap)
            reading = Reading(self._resources, attempt, placed, plan, call, self._progress, self._replays)
            report, worker = await reading.run(), placed.worker
            kept = await self._keep(worker, self._order(attempt, plan))
            if isinstance(kept, Refused) and kept.reason is not RefusalReason.DEADLINE:
                raise WorkerFailed(worker.name, kept.message)
            if isinstance(kept, Refused):
                raise refusal(kept)
            clock.span(decode_parts(kept.report))
            attempt.settle(worker)
        metrics.prefilled(report, plan.read_tokens)
        metrics.pulled(kept.report)
        metrics.prompted(plan.read_tokens)
        usage, timings = Usage(plan.read_tokens), timings_of(clock, report)
        self._emit(PrefillFinished(kept.session, usage, timings, density_of(report), call.request_id))

    def _order(self, attempt: Attempt, plan: Plan) -> KeepSession:
        call, chain = self._call, self._chain
        ids = plan.inexact_ids(call.method)
        return KeepSession(attempt.request_id, call.ttl_s, call.deadline, chain, call.trace, ids)

    async def _from_prefix(self, plan: Plan) -> bool:
        """Continue from a session that holds the prompt's beginning, and keep the whole. False if there is
        none, or no more. A worker keeps what it appends on the way to an answer: there is one of a token."""
        call, resources, clock = self._call, self._resources, self._clock
        found = await find(resources.fleet, resources.settings, call.owner, plan.read_ids, self._chain)
        if found is None:
            return False
        await self._share.take(plan.read_tokens - found.tokens + 1)
        with Attempt(resources.fleet, self._share) as attempt:
            tokens, one = plan.read_tokens, Sampling(max_tokens=1)
            whole = Reservation(
                attempt.request_id,
                call.owner,
                tokens,
                1,
                keep_tokens=tokens,
                door=resources.door,
            )
            if isinstance(await reserve(attempt, found.worker, found.reservation(whole)), Refused):
                return False
            clock.lap("admission")
            job = GenerateJob(
                attempt.request_id,
                one,
                keep_tokens=tokens,
                keep_ttl_s=call.ttl_s,
                deadline=call.deadline,
                chain=self._chain,
                trace=call.trace,
            )
            session, report = await self._appended(attempt, found, found.job(job, plan.read_ids))
        clock.span(decode_parts(report))
        resources.metrics.prompted(tokens, found.tokens)
        usage = Usage(tokens, cached_tokens=found.tokens)
        self._emit(
            PrefillFinished(session, usage, timings_of(clock, None), density_of(None), call.request_id)
        )
        return True

    async def _appended(
        self, attempt: Attempt, found: FoundPrefix, job: GenerateJob
    ) -> tuple[Session, DecodeReport]:
        """The session that a job keeps; none is left of one that fails."""
        session: Session | None = None
        fleet, worker = self._resources.fleet, found.worker
        try:
            async for event in worker.generate(job):
                if isinstance(event, FirstTokenTimings):
                    session = event.session
                elif isinstance(event, FinishEvent):
                    attempt.settle(worker)
                    if event.reason is FinishReason.DEADLINE:
                        raise DeadlineExceeded("the deadline passed while the prompt was being read")
                    if session is None or event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                        raise WorkerFailed(worker.name, event.message or f"{worker.name} gave the request up")
                    fleet.confirm(worker, attempt.request_id)
                    return session, event.report
            raise WorkerFailed(worker.name, f"{worker.name} ended without a result")
        except BaseException:
            if session is not None:
                fleet.release(worker, session.session_id, self._call.owner)
            raise

    async def _keep(self, worker: DecodeWorker, job: KeepSession) -> SessionKept | Refused:
        """A session that comes into being while its client leaves is released again."""
        keeping = asyncio.ensure_future(worker.keep(job))
        try:
            return await asyncio.shield(keeping)
        except asyncio.CancelledError:
            self._resources.fleet.spawn(self._release(worker, keeping))
            raise

    async def _release(self, worker: DecodeWorker, keeping: asyncio.Future[SessionKept | Refused]) -> None:
        with contextlib.suppress(WorkerError):
            kept = await keeping
            if isinstance(kept, SessionKept):
                await worker.release_session(kept.session.session_id, self._call.owner)
