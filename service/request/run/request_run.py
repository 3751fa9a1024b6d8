"""One Generate request, from ids to its finish event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from ...workers.messages.events import (
    DecodeReport,
    FinishEvent,
    FinishReason,
    FirstTokenTimings,
    PrefillReport,
    Progress,
    Session,
    Token,
    Usage,
)
from ...workers.messages.methods import is_exact
from ...workers.messages.requests import (
    ID_BYTES,
    GenerateJob,
    RefusalReason,
    Refused,
    Reservation,
    Reserved,
)
from ...workers.roles import DecodeWorker
from ..errors import DeadlineExceeded, NotFound, WorkerError, WorkerFailed, WorkerHandoffFailed, WorkerLost
from ..fleet.sessions import NO_SESSION, worker_of
from .answers import GenerateFinished, density_of, timings_of
from .attempt import Attempt, Emit, Forward, Replays, Resources, tokenize
from .callers import Share
from .calls import GenerateCall, Prompt
from .detokenize import Match
from .placement import place, refusal, reserve
from .plan import Plan, plan_answer
from .prefix import chain_of, find, links_of
from .reading import Reading
from .streamed import Streamed
from .texts import Held
from .timings import TtftClock, decode_parts

_STOPPING_S = 5.0
"""How long to wait for what a worker has to say of an answer that is complete."""

_WorkerEvents = AsyncIterator[FirstTokenTimings | Token | FinishEvent]


class Generation:
    """State that outlives an attempt, so that a replay goes on from what was streamed. limit: the
    call's deadline."""

    def __init__(
        self,
        resources: Resources,
        call: GenerateCall,
        clock: TtftClock,
        emit: Emit,
        share: Share,
        limit: asyncio.Timeout,
        held: Held,
    ) -> None:
        self._held = held
        self._share = share
        self._limit = limit
        self._resources = resources
        self._call = call
        self._clock = clock
        self._emit = emit
        self._streamed = Streamed(resources.tokenizer.decode, call, resources.eos_ids)
        self._replays = Replays(resources, clock, lambda: bool(self._streamed.ids))
        self._forward = Forward(emit)
        self._prompt = b""
        self._append = b""
        self._last_token_at = time.monotonic()
        self._gaps: list[float] = []
        self._chain = b""
        self._before = 0
        self._cached = 0
        self._session: tuple[DecodeWorker, Session] | None = None
        self._prefill: PrefillReport | None = None
        self._decoded: list[DecodeReport] = []

    async def run(self) -> None:
        """Emit Progress …, Usage, Token …, GenerateFinished. Raises DeltafrontError."""
        await self._tokenize()
        self._clock.lap("tokenize")
        call = self._call
        if call.prompt is not None and self._resources.settings.prefix_reuse:
            whole, model = self._prompt + self._append, self._resources.model
            self._chain = await asyncio.to_thread(
                chain_of, whole, call.owner, model, call.method, call.cache_salt
            )
        once = self._answer_prompt if call.session_id is None else self._answer_session
        try:
            await self._replays.run(once)
        except BaseException:
            self._forget_session()
            raise

    async def _tokenize(self) -> None:
        """Text is not kept beside its ids."""
        resources, held, call = self._resources, self._held, self._call
        if call.prompt is not None:
            answer = call.append is None
            self._prompt = await tokenize(resources, held, call.prompt, follows=False, answer=answer)
        if call.append is not None:
            self._append = await tokenize(resources, held, call.append, follows=True, answer=True)
        self._call = replace(call, prompt=call.prompt and Prompt(), append=None)
        held.release()

    def _plan(self) -> Plan:
        """Only the worker of a session knows whether that was read exactly."""
        call, positions = self._call, self._resources.positions
        wanted, keep = call.sampling.max_tokens, call.keep_ttl_s > 0
        said, cut = self._streamed.ids, call.cut
        plan = plan_answer(self._prompt, self._append, wanted, positions, said, keep, cut)
        exact = call.session_id is None and is_exact(call.method, plan.read_tokens)
        return replace(plan, recompute_blocks=0 if exact else call.recompute_blocks)

    async def _answer_prompt(self) -> None:
        self._forget_session()
        plan, call = self._plan(), self._call
        if self._is_complete(plan):
            return
        if await self._answer_prefix(plan):
            return
        self._cached = 0
        await self._share.take(plan.read_tokens + plan.answer_tokens)
        with Attempt(self._resources.fleet, self._share) as attempt:
            reservation = self._reservation(attempt, plan)
            placed = await place(self._resources, attempt, plan, reservation, self._replays.mark)
            reading = Reading(self._resources, attempt, placed, plan, call, self._progress, self._replays)
            report = await reading.run()
            if not self._streamed.ids:
                self._prefill = report
            await self._decode(attempt, placed.worker, self._job(attempt, plan))

    async def _answer_prefix(self, plan: Plan) -> bool:
        """Continue from a session that holds the prompt's beginning, of which a token at least is left to be
        read, whatever has been answered. False if there is none, or no more: then the prompt is read like any
        other."""
        call, resources = self._call, self._resources
        found = await find(resources.fleet, resources.settings, call.owner, plan.read_ids, self._chain)
        if found is None:
            return False
        plan = replace(plan, recompute_blocks=call.recompute_blocks)  # its worker knows how it was read
        await self._share.take(plan.read_tokens - found.tokens + plan.answer_tokens)
        with Attempt(resources.fleet, self._share) as attempt:
            reservation = found.reservation(self._reservation(attempt, plan))
            if isinstance(await reserve(attempt, found.worker, reservation), Refused):
                return False
            self._cached = found.tokens
            self._replays.mark("admission")
            await self._decode(attempt, found.worker, found.job(self._job(attempt, plan), plan.all_ids))
        return True

    async def _answer_session(self) -> None:
        plan, call = self._plan(), self._call
        if self._streamed.ended(plan.max_tokens) is not None and not self._before:
            self._before = self._cached = await self._session_tokens()
        if self._is_complete(plan):
            return
        await self._share.take(plan.read_tokens + plan.max_tokens)
        with Attempt(self._resources.fleet, self._share) as attempt:
            worker = await self._resources.fleet.session_worker(worker_of(call.session_id or ""))
            try:
                answer = await reserve(attempt, worker, self._reservation(attempt, plan))
                if isinstance(answer, Refused) and answer.reason is RefusalReason.POSITIONS and call.cut:
                    # As a prompt's, whose length is known here.
                    plan = replace(plan, max_tokens=answer.tokens_left)
                    if self._is_complete(plan):
                        return
                    if plan.max_tokens:
                        answer = await reserve(attempt, worker, self._reservation(attempt, plan))
                if isinstance(answer, Refused):
                    raise refusal(answer)
                self._before = self._cached = answer.session_tokens
                self._replays.mark("admission")
                await self._decode(attempt, worker, self._job(attempt, plan))
            except WorkerLost as error:
                self._resources.fleet.forget(error.worker)
                if self._is_complete(self._plan()):
                    return
                raise NotFound(f"{NO_SESSION}; its decode worker died: send the prompt again") from error

    async def _session_tokens(self) -> int:
        """Of the session, for the usage of an answer that is complete; 0 if its worker does not say."""
        fleet, call = self._resources.fleet, self._call
        try:
            with Attempt(fleet, self._share) as attempt:
                async with asyncio.timeout(_STOPPING_S):
                    worker = await fleet.session_worker(worker_of(call.session_id or ""))
                    attempt.add(worker)
                    request_id, door = attempt.request_id, self._resources.door
                    nothing = Reservation(request_id, call.owner, 0, 0, call.session_id, door=door)
                    answer = await worker.reserve(nothing)
        except (TimeoutError, NotFound, WorkerError):
            return 0
        return answer.session_tokens if isinstance(answer, Reserved) else 0

    def _reservation(self, attempt: Attempt, plan: Plan) -> Reservation:
        call = self._call
        return Reservation(
            attempt.request_id,
            call.owner,
            plan.read_tokens,
            plan.max_tokens,
            call.session_id,
            plan.keep_tokens,
            call.page_selection,
            wait=True,
            deadline=call.deadline,
            door=self._resources.door,
            append_tokens=plan.answered_tokens,
            recompute_blocks=plan.recompute_blocks,
        )

    def _job(self, attempt: Attempt, plan: Plan) -> GenerateJob:
        """A prompt's K/V comes from a prefill group. What is appended to a session, or has been answered
        already, goes with the job."""
        call = self._call
        return GenerateJob(
            attempt.request_id,
            replace(call.sampling, max_tokens=plan.max_tokens),
            append_ids=plan.answered_ids if call.session_id is None else plan.read_ids,
            session_id=call.session_id,
            page_selection=call.page_selection,
            keep_tokens=plan.keep_tokens,
            keep_ttl_s=call.keep_ttl_s,
            deadline=call.deadline,
            chain=links_of(self._chain, plan.keep_tokens),
            trace=call.trace,
            recompute_blocks=plan.recompute_blocks,
            prompt_ids=self._prompt_ids(plan),
            answered_tokens=len(self._streamed.ids),
        )

    def _prompt_ids(self, plan: Plan) -> bytes:
        """Of a prompt whose blocks are computed again, now or for questions to the session made of it."""
        call = self._call
        needed = call.session_id is None and (plan.recompute_blocks or plan.keep_tokens)
        return plan.inexact_ids(call.method) if needed else b""

    async def _decode(self, attempt: Attempt, worker: DecodeWorker, job: GenerateJob) -> None:
        stream = worker.generate(job)
        first: FirstTokenTimings | None = None
        async for event in stream:
            if isinstance(event, FirstTokenTimings):
                first = event
                self._note_session(worker, event)
            elif isinstance(event, Token):
                if self._token(event, first.report if first is not None else DecodeReport()):
                    last = await self._stop(attempt, worker, stream)
                    self._finish(FinishReason.STOP_STRING, last)
                    return
            else:
                attempt.settle(worker)
                if self._session is not None:
                    self._resources.fleet.confirm(worker, attempt.request_id)
                self._end(worker, event)
                return
        raise WorkerFailed(worker.name, f"{worker.name} ended without a result")

    def _token(self, event: Token, report: DecodeReport) -> bool:
        """Stream one token; True if a stop string ended the answer."""
        now, index = time.monotonic(), len(self._streamed.ids)
        if not index:
            self._first_token(report)
            self._emit(Usage(self._prompt_tokens, cached_tokens=self._cached))
        else:
            self._gaps.append(now - self._last_token_at)
            self._resources.metrics.next_token(self._gaps[-1])
        self._last_token_at = now
        match = self._streamed.push(event.token_id)
        self._emit(replace(event, index=index, text=match.text))
        return match.stopped

    def _first_token(self, report: DecodeReport) -> None:
        """A request is measured once, by the attempt that got this far."""
        metrics = self._resources.metrics
        self._clock.span(decode_parts(report))
        metrics.first_token(self._clock.read().parts, self._prompt_tokens - self._cached)
        if self._prefill is not None:
            metrics.prefilled(self._prefill, self._prompt_tokens)
            metrics.pulled(report)

    async def _stop(self, attempt: Attempt, worker: DecodeWorker, stream: _WorkerEvents) -> DecodeReport:
        """Cancel the rest of an answer that is complete, so that its deadline has been met, and wait a little
        for the worker's last report."""
        self._limit.reschedule(None)
        try:
            async with asyncio.timeout(_STOPPING_S):
                await worker.cancel(attempt.request_id)
                async for event in stream:
                    if isinstance(event, FinishEvent):
                        attempt.settle(worker)
                        return event.report
        except WorkerLost:
            self._forget_session()
        except (TimeoutError, WorkerError):
            pass  # the answer is complete; only its page counts are lost
        return DecodeReport()

    def _end(self, worker: DecodeWorker, event: FinishEvent) -> None:
        if event.reason is FinishReason.DEADLINE:
            raise DeadlineExceeded("the deadline passed while the answer was being generated")
        if event.reason in (FinishReason.FAILED, FinishReason.CANCELLED, FinishReason.NO_KV):
            self._decoded.append(event.report)
            kind = WorkerHandoffFailed if event.reason is FinishReason.NO_KV else WorkerFailed
            raise kind(worker.name, event.message or f"{worker.name} gave the request up")
        self._finish(event.reason, event.report)

    def _is_complete(self, plan: Plan) -> bool:
        """A worker or a door may die between the last token and the finish event: nothing is left to do."""
        reason = self._streamed.ended(plan.max_tokens)
        if reason is not None:
            self._finish(reason, DecodeReport())
        return reason is not None

    def _finish(self, reason: FinishReason, report: DecodeReport) -> None:
        """Text that was held back comes with it, up to a stop string that it may complete."""
        rest = Match("") if reason is FinishReason.STOP_STRING else self._streamed.flush()
        reason = FinishReason.STOP_STRING if rest.stopped else reason
        self._decoded.append(report)
        held = sum(one.pages_held for one in self._decoded)
        tokens, answered = self._prompt_tokens, len(self._streamed.ids)
        metrics, gaps = self._resources.metrics, self._gaps
        metrics.prompted(tokens, self._cached)
        metrics.answered(reason, answered, sum(gaps) / len(gaps) if gaps else None)
        metrics.decoded(self._decoded)
        finished = GenerateFinished(
            reason=reason,
            text=rest.text,
            usage=Usage(tokens, answered, self._cached),
            timings=timings_of(self._clock, self._prefill),
            density=density_of(self._prefill),
            session=None if self._session is None else self._session[1],
            page_share=sum(one.pages_attended for one in self._decoded) / held if held else 1.0,
            request_id=self._call.request_id,
            recomputed_tokens=sum(one.recomputed_tokens for one in self._decoded),
        )
        self._emit(finished)

    def _progress(self, event: Progress) -> None:
        """A replay in the middle of the answer reads again, but that is not the client's concern."""
        if not self._streamed.ids:
            self._forward(event)

    @property
    def _prompt_tokens(self) -> int:
        """Before the answer, a session's included."""
        return self._before + (len(self._prompt) + len(self._append)) // ID_BYTES

    def _note_session(self, worker: DecodeWorker, event: FirstTokenTimings) -> None:
        if event.session is not None:
            self._session = (worker, event.session)

    def _forget_session(self) -> None:
        """A session of an attempt whose client will never be told its id."""
        if self._session is not None:
            worker, session = self._session
            self._resources.fleet.release(worker, session.session_id, self._call.owner)
            self._session = None
