"""One Prefill request, from ids to a session."""

from __future__ import annotations

import asyncio
import contextlib

from ...workers.messages import KeepSession, RefusalReason, Refused, Reserve, SessionKept, Usage
from ...workers.roles import DecodeWorker
from ..errors import WorkerError, WorkerFailed
from .answers import PrefillFinished, density_of, timings_of
from .attempt import Attempt, Emit, Resources, Take, tokenize, with_replays
from .calls import PrefillCall
from .placement import place, read, refusal
from .plan import plan_session
from .timings import TtftClock, decode_parts, prefill_parts


class Prefilling:
    """Reads a prompt and keeps its K/V on a decode worker."""

    def __init__(
        self, resources: Resources, call: PrefillCall, clock: TtftClock, emit: Emit, take: Take
    ) -> None:
        self._take = take
        self._resources = resources
        self._call = call
        self._clock = clock
        self._emit = emit
        self._prompt = b""

    async def run(self) -> None:
        """Emit Progress …, PrefillFinished. Raises DeltafrontError."""
        self._prompt = await tokenize(self._resources, self._call.prompt, follows=False, answer=False)
        self._clock.lap("tokenize")
        await with_replays(self._resources, self._clock, self._once, lambda: False)

    async def _once(self) -> None:
        call, clock, metrics = self._call, self._clock, self._resources.metrics
        plan = plan_session(self._prompt, self._resources.positions)
        self._take(plan.read_tokens)
        with Attempt(self._resources.fleet) as attempt:
            wish = Reserve(
                attempt.request_id,
                call.owner,
                plan.read_tokens,
                plan.max_tokens,
                door=self._resources.door,
                deadline=call.deadline,
            )
            placed = await place(self._resources, attempt, plan, wish, clock.lap)
            report = await read(self._resources, attempt, placed, plan, call.method, self._emit)
            worker = placed.worker
            clock.span(prefill_parts(report))
            kept = await self._keep(worker, KeepSession(attempt.request_id, call.ttl_s, call.deadline))
            if isinstance(kept, Refused) and kept.reason is not RefusalReason.DEADLINE:
                raise WorkerFailed(worker.name, kept.message)
            if isinstance(kept, Refused):
                raise refusal(kept)
            clock.span(decode_parts(kept.report))
            attempt.settle(worker)
        metrics.prefilled(report)
        metrics.pulled(kept.report)
        metrics.tokens(plan.read_tokens, 0)
        usage, timings = Usage(plan.read_tokens), timings_of(clock, report)
        self._emit(PrefillFinished(kept.session, usage, timings, density_of(report), call.request_id))

    async def _keep(self, worker: DecodeWorker, order: KeepSession) -> SessionKept | Refused:
        """A session that comes into being while its client leaves is released again."""
        keeping = asyncio.ensure_future(worker.keep(order))
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
