"""One request, from its checked call to its last event.

A prefill group prefills the prompt, or the rest after a prefix hit. A decode worker itself prefills a short
rest after its prefix hit, and text appended to its session. Then a decode worker answers. For a Prefill
(`max_tokens` 0) it keeps the KV cache as a session.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from deltafront.kernels.methods import is_exact
from deltafront.service.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    WorkerError,
    WorkerFailed,
    WorkerHandoffFailed,
    WorkerLost,
)
from deltafront.service.fleet.session_ids import NO_SESSION, worker_of
from deltafront.service.request.callers import RequestUse
from deltafront.service.request.calls import Call, Prompt
from deltafront.service.request.context import Accepted, Resources
from deltafront.service.request.run.answer import Answer
from deltafront.service.request.run.attempt import Replays, WorkerLeases, deadline_timeout
from deltafront.service.request.run.fork import Fork
from deltafront.service.request.run.placement import (
    READ_TOO_LATE,
    place,
    place_on_worker,
    refusal_error,
    reserve,
)
from deltafront.service.request.run.plan import Plan, constrained, plan_answer
from deltafront.service.request.run.prefix import PrefixHit, find_prefix
from deltafront.service.request.run.prompt_prefill import PromptPrefill
from deltafront.service.request.run.prompt_tokens import PromptTokens, prompt_tokens
from deltafront.workers.messages import events, requests
from deltafront.workers.roles import DecodeWorker, GenerateEvent

_LAST_REPORT_S = 5.0
"""How long to wait for a worker's report on a complete answer."""

_FAILURES = (events.FinishReason.FAILED, events.FinishReason.CANCELLED, events.FinishReason.NO_KV)
_WorkerEvents = AsyncIterator[GenerateEvent]


class RequestRun:
    """Runs a request. Its state survives a failed attempt, so that the next one resumes after the streamed
    tokens.
    """

    def __init__(
        self, resources: Resources, call: Call, accepted: Accepted, fork: Fork | None = None
    ) -> None:
        self._resources = resources
        self._call = call
        self._accepted = accepted
        self._answer = Answer(resources, call, accepted)
        self._replays = Replays(resources, accepted.clock, call.request_id)
        self._tokens = PromptTokens()
        self._fork = fork
        """Shared with the prompt's other choices. The one that keeps a session offers it to the others."""
        self._kept: tuple[DecodeWorker, events.Session] | None = None
        """The session that the last event will name."""

    async def run(self) -> None:
        """Run the request to its last event. Raises DeltafrontError."""
        with self._accepted.use as use:
            use.run()
            async with deadline_timeout(self._call.options.deadline) as timeout:
                await self._attempts(use, timeout)
        self._resources.shadow.offer(self._call, self._tokens.ids, self._answer.sampled)

    async def _attempts(self, use: RequestUse, timeout: asyncio.Timeout) -> None:
        clock = self._accepted.clock
        await self._tokenize()
        clock.lap("tokenize")
        if self._call.answered:
            clock.stop()
            self._answer.resume()
        source = self._from_prompt if self._call.session_id is None else self._from_session
        try:
            while True:
                try:
                    return await source(use, timeout)
                except WorkerError as error:
                    await self._replays.back_off(error)
        except BaseException:
            self._release_kept()
            raise

    async def _tokenize(self) -> None:
        resources, text = self._resources, self._accepted.text
        call = await constrained(resources, self._call)
        self._tokens = await prompt_tokens(resources, text, call)
        self._call = replace(call, prompt=call.prompt and Prompt(), append=None)
        text.release()
        self._answer.new_tokens = self._tokens.count
        if call.echo:
            await asyncio.to_thread(self._answer.echo, self._tokens.ids)

    def _plan(self) -> Plan:
        call = self._call
        plan = plan_answer(
            self._tokens.prompt,
            self._tokens.append,
            max_tokens=call.sampling.max_tokens,
            positions=self._resources.positions,
            answered=self._answer.ids,
            keep=call.options.keep_ttl_s > 0,
            fit_max_tokens=call.fit_max_tokens,
        )
        exact = call.session_id is None and is_exact(call.method, plan.prefill_tokens)
        blocks = 0 if exact else call.options.recompute_blocks
        in_session = call.session_id is not None
        return replace(plan, recompute_blocks=blocks, session_id=call.session_id, worker_prefills=in_session)

    async def _from_prompt(self, use: RequestUse, timeout: asyncio.Timeout) -> None:
        self._release_kept()
        plan, resources = self._plan(), self._resources
        if self._is_complete(plan):
            return
        if self._fork is not None and not plan.keep_tokens and await self._from_fork(use, timeout, plan):
            return
        if self._call.options.prompt_logprobs is not None:
            return await self._from_worker(use, timeout, plan)
        hit = await self._find_prefix(plan)
        if hit is not None and not hit.group_prefills:
            if await self._from_prefix(use, timeout, plan, hit):
                return
            hit = None
        await use.set_tokens(plan.prefill_tokens + plan.answer_tokens)
        with WorkerLeases(resources.fleet, self._call.request_id) as leases:
            lap, method = self._accepted.clock.lap, self._call.method.name
            placed = await place(resources, leases, plan, self._reservation, hit, method, lap)
            plan = placed.plan
            self._answer.record_reserved(placed.reserved)
            worker = placed.worker
            prefill = PromptPrefill(resources, leases, placed.groups, worker, plan, self._call, self._replays)
            report = await prefill.run(self._answer.progress)
            self._answer.record_prefill(report, plan.recompute_blocks)
            if self._call.prefill_only:
                await self._keep(leases, worker, plan)
            else:
                await self._decode(leases, worker, self._job(leases, plan), timeout)

    async def _from_worker(self, use: RequestUse, timeout: asyncio.Timeout, plan: Plan) -> None:
        """Have a decode worker prefill the whole prompt, densely, for its log-probabilities."""
        plan = plan.on_worker(recompute_blocks=0)
        await use.set_tokens(plan.prefill_tokens + plan.answer_tokens)
        with WorkerLeases(self._resources.fleet, self._call.request_id) as leases:
            reservation = self._reservation(leases, plan)
            worker, reserved = await place_on_worker(self._resources, leases, plan, reservation)
            self._answer.record_reserved(reserved)
            self._accepted.clock.lap("admission")
            await self._decode(leases, worker, self._job(leases, plan), timeout)

    async def _from_fork(self, use: RequestUse, timeout: asyncio.Timeout, plan: Plan) -> bool:
        """Try once to answer from the session of the prompt's first choice. Returns False if impossible."""
        assert self._fork is not None
        forked, self._fork = await self._fork.session(), None
        if forked is None:
            return False
        worker, session = forked
        plan = plan.on_worker(session.tokens, session_id=session.session_id)
        return await self._extend(use, timeout, plan, worker)

    async def _find_prefix(self, plan: Plan) -> PrefixHit | None:
        if self._tokens.key is None or self._call.skip_cache:
            return None
        fleet, method, tier = self._resources.fleet, self._call.method, self._call.options.service_tier
        tokens, answer = plan.prefill_tokens, plan.answer_tokens
        return await find_prefix(
            fleet, self._tokens.key, method, tokens=tokens, answer_tokens=answer, tier=tier
        )

    async def _from_prefix(
        self, use: RequestUse, timeout: asyncio.Timeout, plan: Plan, hit: PrefixHit
    ) -> bool:
        """Answer from a prefix hit whose worker prefills the rest. Returns False if the prefix has since been
        evicted, or the worker has no room.

        On this path a worker makes a session only after a first token, so a Prefill requests one token.
        """
        worker, prefix = hit.worker, hit.prefix
        ids, start = plan.prefill_ids, prefix.tokens * requests.ID_BYTES
        plan = plan.on_worker(
            prefix.tokens,
            max_tokens=max(1, plan.max_tokens),
            recompute_blocks=0 if prefix.exact else self._call.options.recompute_blocks,
            prefix_tokens=prefix.tokens,
        )
        recomputed = not prefix.exact and (plan.recompute_blocks or plan.keep_tokens)
        return await self._extend(use, timeout, plan, worker, ids[:start] if recomputed else b"")

    async def _extend(
        self,
        use: RequestUse,
        timeout: asyncio.Timeout,
        plan: Plan,
        worker: DecodeWorker,
        prompt_ids: bytes = b"",
    ) -> bool:
        """Answer on a worker that has the prompt's beginning. Returns False if it has no room."""
        await use.set_tokens(plan.prefill_tokens + plan.answer_tokens)
        with WorkerLeases(self._resources.fleet, self._call.request_id) as leases:
            reserved = await reserve(leases, worker, self._reservation(leases, plan))
            if isinstance(reserved, requests.Refused):
                return False
            self._answer.record_reserved(reserved)
            self._accepted.clock.lap("admission")
            job = replace(self._job(leases, plan), prompt_ids=prompt_ids)
            await self._decode(leases, worker, job, timeout)
        return True

    async def _from_session(self, use: RequestUse, timeout: asyncio.Timeout) -> None:
        plan, call, answer, fleet = self._plan(), self._call, self._answer, self._resources.fleet
        if answer.finish_reason(plan.max_tokens) is not None and not answer.session_tokens:
            answer.session_tokens = answer.cached_tokens = await self._session_tokens()
        if self._is_complete(plan):
            return
        await use.set_tokens(plan.prefill_tokens + plan.max_tokens)
        with WorkerLeases(fleet, call.request_id) as leases:
            worker = await fleet.session_worker(worker_of(call.session_id or ""))
            try:
                reserved = await reserve(leases, worker, self._reservation(leases, plan))
                if (
                    isinstance(reserved, requests.Refused)
                    and reserved.reason is requests.RefusalReason.POSITIONS
                    and call.fit_max_tokens
                ):
                    # Only the worker knows the session's length.
                    plan = replace(plan, max_tokens=reserved.tokens_left)
                    if self._is_complete(plan):
                        return
                    if plan.max_tokens:
                        reserved = await reserve(leases, worker, self._reservation(leases, plan))
                if isinstance(reserved, requests.Refused):
                    raise refusal_error(reserved)
                answer.session_tokens = reserved.held_tokens
                answer.record_reserved(reserved)
                self._accepted.clock.lap("admission")
                await self._decode(leases, worker, self._job(leases, plan), timeout)
            except WorkerLost as error:
                fleet.forget(error.worker)
                if self._is_complete(self._plan()):
                    return
                raise NotFound(f"{NO_SESSION}; its decode worker died: send the prompt again") from error

    async def _session_tokens(self) -> int:
        """Ask for the session's length, for a complete answer's usage; 0 if the worker does not answer."""
        fleet, call = self._resources.fleet, self._call
        try:
            with WorkerLeases(fleet, call.request_id) as leases:
                async with asyncio.timeout(_LAST_REPORT_S):
                    worker = await fleet.session_worker(worker_of(call.session_id or ""))
                    nothing = Plan(b"", 0, session_id=call.session_id, worker_prefills=True)
                    empty = self._reservation(leases, nothing)
                    reserved = await reserve(leases, worker, replace(empty, wait=False))
        except (TimeoutError, NotFound, WorkerError):
            return 0
        return reserved.held_tokens if isinstance(reserved, requests.Reserved) else 0

    def _reservation(self, leases: WorkerLeases, plan: Plan) -> requests.Reservation:
        call = self._call
        return requests.Reservation(
            request_id=leases.request_id,
            owner=call.owner,
            new_tokens=plan.new_tokens,
            max_tokens=plan.max_tokens,
            session_id=plan.session_id,
            keep_tokens=plan.keep_tokens if plan.max_tokens else 0,
            options=replace(call.options, recompute_blocks=plan.recompute_blocks),
            wait=not plan.prefix_tokens,  # with a prefix hit, another worker may have room
            door=self._resources.door,
            prefix_tokens=plan.prefix_tokens,
            reads_rest=plan.worker_prefills,
            key=None if plan.session_id is not None else self._tokens.key,
            resume_tokens=plan.answered_tokens,
        )

    def _job(self, leases: WorkerLeases, plan: Plan) -> requests.GenerateJob:
        call = self._call
        # Blocks are recomputed for this answer, or later for questions to the kept session.
        recomputed = not plan.worker_prefills and (plan.recompute_blocks or plan.keep_tokens)
        return requests.GenerateJob(
            request_id=leases.request_id,
            sampling=replace(call.sampling, max_tokens=plan.max_tokens),
            extend_ids=plan.prefill_ids if plan.worker_prefills else plan.answered_ids,
            keep_tokens=plan.keep_tokens,
            prompt_ids=plan.inexact_ids(call.method) if recomputed else b"",
            answered_tokens=len(self._answer.ids),
            distinct_ids=self._tokens.distinct,
        )

    async def _decode(
        self, leases: WorkerLeases, worker: DecodeWorker, job: requests.GenerateJob, timeout: asyncio.Timeout
    ) -> None:
        """Stream a worker's answer to the client, and note its session. A Prefill's one token is dropped."""
        stream, report = worker.generate(job), events.DecodeReport()
        async for event in stream:
            if isinstance(event, events.PromptLogprobs):
                self._answer.prompt_logprobs(event)
            elif isinstance(event, events.FirstTokenTimings):
                report = event.report
                if event.session is not None:
                    self._kept, self._answer.session = (worker, event.session), event.session
                    if self._fork is not None:
                        self._fork.offer(self._kept)
            elif isinstance(event, events.FinishEvent):
                leases.settle(worker)
                if self._kept is not None:
                    self._resources.fleet.confirm(worker, leases.request_id)
                self._finish(worker, event)
                return
            elif not self._call.prefill_only and self._answer.token(event, report):
                timeout.reschedule(None)  # the complete answer met its deadline
                last = await self._stop(leases, worker, stream)
                self._answer.finish(events.FinishReason.STOP_STRING, last)
                return
        raise WorkerFailed(worker.name, f"{worker.name} ended without a result")

    async def _stop(
        self, leases: WorkerLeases, worker: DecodeWorker, stream: _WorkerEvents
    ) -> events.DecodeReport:
        try:
            async with asyncio.timeout(_LAST_REPORT_S):
                await worker.cancel(leases.request_id)
                async for event in stream:
                    if isinstance(event, events.FinishEvent):
                        leases.settle(worker)
                        return event.report
        except WorkerLost:
            self._release_kept()
        except (TimeoutError, WorkerError):
            pass  # only counts of pages are lost
        return events.DecodeReport()

    def _finish(self, worker: DecodeWorker, event: events.FinishEvent) -> None:
        session = self._answer.session
        if event.reason is events.FinishReason.DEADLINE:
            late = "the deadline passed while the answer was being generated"
            raise DeadlineExceeded(READ_TOO_LATE if self._call.prefill_only else late)
        if event.reason is events.FinishReason.GRAMMAR:
            raise InvalidArgument("", f"the answer ended: {event.message}; simplify its schema or tools")
        if event.reason in _FAILURES:
            self._answer.decoded.append(event.report)
            kind = WorkerHandoffFailed if event.reason is events.FinishReason.NO_KV else WorkerFailed
            raise kind(worker.name, event.message or f"{worker.name} gave the request up")
        if not self._call.prefill_only:
            self._answer.finish(event.reason, event.report)
        elif session is None:
            raise WorkerFailed(worker.name, f"{worker.name} kept no session")
        else:
            self._answer.finish_prefill(session, event.report)

    def _is_complete(self, plan: Plan) -> bool:
        """Finish the answer if a worker or a door died just before the finish event."""
        reason = self._answer.finish_reason(plan.max_tokens)
        if reason is not None:
            self._answer.finish(reason, events.DecodeReport())
        return reason is not None

    async def _keep(self, leases: WorkerLeases, worker: DecodeWorker, plan: Plan) -> None:
        """Make the prompt a session, and release it if the client leaves before it is ready."""
        call = self._call
        job = requests.KeepSession(request_id=leases.request_id, prompt_ids=plan.inexact_ids(call.method))
        keeping = asyncio.ensure_future(worker.keep(job))
        try:
            kept = await asyncio.shield(keeping)
        except asyncio.CancelledError:
            self._resources.fleet.spawn(_release(worker, keeping, call.owner))
            raise
        if isinstance(kept, requests.Refused):
            late = kept.reason is requests.RefusalReason.DEADLINE
            raise refusal_error(kept) if late else WorkerFailed(worker.name, kept.message)
        leases.settle(worker)
        self._answer.finish_prefill(kept.session, kept.report)

    def _release_kept(self) -> None:
        """Release a failed attempt's session, because no client learns its id."""
        if self._kept is not None:
            worker, session = self._kept
            self._resources.fleet.release(worker, session.session_id, self._call.owner)
            self._kept = self._answer.session = None


async def _release(worker: DecodeWorker, keeping: asyncio.Future[Any], owner: str) -> None:
    with contextlib.suppress(WorkerError):
        kept = await keeping
        if isinstance(kept, events.SessionKept):
            await worker.release_session(kept.session.session_id, owner)
