"""The scheduler of a prefill group: sends batches of chunks to all stages, and ends requests.

All stages must get the same commands in the same order, because activations travel between them without
headers. The controller therefore makes each decision and sends its commands without an await in between.

A request gets pages when its first chunk is scheduled (`schedule`). When it ends early, its chunks in flight
stop before their next layer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from deltafront.kernels.constants import BLOCK
from deltafront.workers.messages.events import ChunkRead, PrefillDone
from deltafront.workers.messages.requests import (
    PrefillCancelled,
    PrefillFailed,
    PrefillJob,
    RefusalReason,
    Refused,
)
from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.messages.stages import ChunkCommand, HandoffFailed, OpenRequest, RequestFailed
from deltafront.workers.messages.states import GroupStats
from deltafront.workers.prefill.group import schedule
from deltafront.workers.prefill.group.chunks import ChunkSizes, ModelWork
from deltafront.workers.prefill.group.pipeline import Outcome, Pipeline
from deltafront.workers.prefill.group.request_table import PrefillRequests, Request
from deltafront.workers.prefill.group.watch import StageWatch
from deltafront.workers.roles import PrefillEvent, Stage
from deltafront.workers.settings import PrefillConfig
from deltafront.workers.tracing import NO_TRACER, Span, Tracer

_LEASE_GRACE = 0.1
"""A request ends when this share of its lease has passed after the lease expired."""
_ASK_AGAIN_S = 0.02
"""Seconds until the controller asks again whether decode workers still read a request's pages."""


class _Chunk(NamedTuple):
    """A chunk that was sent. `opening`: the command that opens its request, before its first chunk."""

    request: Request
    command: ChunkCommand
    opening: OpenRequest | None
    span: Span


class PrefillController:
    """Runs prompts through a group's stages, chunk by chunk.

    Args:
        end_stages: Called once when the group is lost, with the number of the stage that hangs, or None. It
            must make every outstanding call to a stage raise an error.
        pulse: Pings the stage of this number.
        work: The work of each stage's layers, from which `ChunkSizes` chooses chunks; None: chunks run alone.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        config: PrefillConfig,
        end_stages: Callable[[int | None], None],
        pulse: Callable[[int], Awaitable[object]],
        *,
        clock: Callable[[], float] = time.perf_counter,
        work: ModelWork | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        if config.chunk_tokens < BLOCK or config.chunk_tokens % BLOCK:
            raise ValueError(f"chunk_tokens {config.chunk_tokens} is not a multiple of {BLOCK}")
        self.name = name
        watch = StageWatch(len(stages), pulse, self._hangs, clock, config.stall_s)
        self._pipeline = Pipeline(stages, watch, self._pump, config.chunk_slack_s)
        self._config = config
        self._end_stages = end_stages
        self._clock = clock
        self._tracer = tracer
        self._sizes = ChunkSizes(config.chunk_tokens, work)
        self._batch_tokens = 0 if work is None else work.batch_tokens
        self._requests = PrefillRequests(config, len(stages), self._batch_tokens)
        self.failure = ""
        """The reason why the group is lost; empty while the group works."""

    async def prefill(self, job: PrefillJob) -> AsyncGenerator[PrefillEvent, None]:
        admitted = self._admit(job)
        if isinstance(admitted, Refused):
            yield admitted
            return
        try:
            self._pump()
            while True:
                event = await admitted.events.get()
                if isinstance(event, PrefillFailed):
                    raise event
                yield event
                if isinstance(event, PrefillDone | Refused):
                    return
        finally:
            await self._end(admitted, None)

    async def queue_refusal(self, tokens: int, tier: ServiceTier = ServiceTier.DEFAULT) -> Refused | None:
        if self.failure:
            raise PrefillFailed(self.failure)
        return self._requests.queue_refusal(tokens, tier, self._clock())

    async def cancel(self, request_id: str) -> None:
        request = self._requests.find(request_id)
        if request is not None:
            await self._end(request, PrefillCancelled(f"prefill of {request_id} was cancelled"))

    async def renew(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            request = self._requests.find(request_id)
            if request is not None and not request.ended:
                self._arm_lease(request)

    async def stats(self) -> GroupStats:
        if self.failure:
            raise PrefillFailed(self.failure)
        return self._requests.stats(self.name, self._clock())

    async def check(self) -> str:
        """Return `failure`. If the group has no request, first ask the stages whether they are alive; while
        it has requests, `StageWatch` does that.
        """
        if not self.failure and not self._requests:
            try:
                await self.stage_pages()
            except Exception as error:
                self._fail(error)
        return self.failure

    async def stage_pages(self) -> list[int]:
        return await self._pipeline.pages()

    async def stop(self) -> None:
        self._fail(RuntimeError("the group is being stopped"))
        await self._pipeline.idle()

    # --- admission ------------------------------------------------------------------------------------

    def _admit(self, job: PrefillJob) -> Request | Refused:
        if self.failure:
            raise PrefillFailed(self.failure)
        if len(job.token_ids) % 4 or not job.tokens:
            raise PrefillFailed(f"{len(job.token_ids)} bytes are not a prompt: token ids take 4 bytes each")
        if job.start % BLOCK or not 0 <= job.start < job.tokens:
            raise PrefillFailed(f"a prompt of {job.tokens} tokens cannot be resumed at token {job.start}")
        request = self._requests.admit(job, self._clock())
        if isinstance(request, Refused):
            return request
        about = {"tokens": job.tokens, "start": job.start, "method": job.method.name}
        began = request.account.arrived
        request.span = self._tracer.begin("prefill", job.trace, self._clock, began, **about)
        self._arm_lease(request)
        if job.deadline is not None:
            late = Refused(reason=RefusalReason.DEADLINE, message="the deadline passed during prefill")
            request.after(job.deadline - time.time(), "deadline", lambda: self._end(request, late))
        return request

    def _arm_lease(self, request: Request) -> None:
        """End the request unless the API server renews its lease in time. A second, short timer follows the
        first, so that a process that was paused can first receive renewals that arrived meanwhile.
        """
        lease = self._config.stream_lease_s
        lost = PrefillCancelled(f"no door has renewed {request.job.request_id} for {lease:g} s")
        grace = _LEASE_GRACE * lease
        last_check = partial(request.after, grace, "lease", lambda: self._end(request, lost))
        request.after(lease, "lease", last_check)

    # --- the pipeline ---------------------------------------------------------------------------------

    def _pump(self) -> None:
        while not self.failure and self._pipeline.ready:
            request = self._requests.next(self._clock())
            if request is None:
                return
            try:
                self._send_batch(request)
            except Exception as error:
                self._fail(error)

    def _send_batch(self, request: Request) -> None:
        """Send the request's next chunk. If it is short, add chunks of the requests that follow."""
        now, chunks, left = self._clock(), list[_Chunk](), self._batch_tokens
        following: Request | None = request
        while following is not None:
            chunks.append(self._next_chunk(following, now))
            left -= chunks[-1].command.tokens
            batch = [chunk.request for chunk in chunks]
            following = self._requests.next_beside(batch, left, now, self._sizes)
        commands = [chunk.command for chunk in chunks]
        openings = [chunk.opening for chunk in chunks if chunk.opening is not None]
        try:
            outcomes = self._pipeline.run_batch(commands, openings, lambda: self._allowed(chunks))
        except Exception as error:
            for chunk in chunks:
                chunk.span.end("failed", str(error))
            raise
        self._pipeline.spawn(self._watch(chunks, now, outcomes))

    def _next_chunk(self, request: Request, now: float) -> _Chunk:
        opening = None
        if not request.opened:
            request.account.began = now
            opening = request.open_request()
        command = request.next_chunk(self._sizes)
        span = request.span.begin("chunk", now, start=command.start, tokens=command.tokens)
        self._requests.chunk_sent(request, command.tokens, now)
        request.in_flight += 1
        return _Chunk(request, replace(command, trace=span.context), opening, span)

    def _allowed(self, chunks: Sequence[_Chunk]) -> float:
        """Return the seconds that a stage may take for a batch."""
        return self._requests.allowed([(chunk.request, chunk.command) for chunk in chunks])

    async def _watch(
        self, chunks: Sequence[_Chunk], sent: float, outcomes: asyncio.Task[list[Outcome]]
    ) -> None:
        try:
            done = await outcomes
        except Exception as error:
            for chunk in chunks:
                chunk.span.end("failed", str(error))
            self._fail(error)
            return
        for chunk, outcome in zip(chunks, done, strict=True):
            if not isinstance(outcome, RequestFailed):
                chunk.span.end("finished")
            elif chunk.request.ended:
                chunk.span.end("cancelled")
            else:
                chunk.span.end("failed", str(outcome))
        self._batch_done(list(zip(chunks, done, strict=True)), sent)
        self._pump()

    def _batch_done(self, outcomes: Sequence[tuple[_Chunk, Outcome]], sent: float) -> None:
        now = self._clock()
        for (request, *_), _outcome in outcomes:
            request.in_flight -= 1
            if not request.in_flight:
                request.waiting = schedule.became_idle(request.waiting, now)
        through = [(chunk.request, chunk.command, one) for chunk, one in outcomes if isinstance(one, list)]
        if through:
            self._requests.batch_through(through, sent, now)
        for chunk, outcome in outcomes:
            self._tell(chunk.request, chunk.command, outcome, now)

    def _tell(self, request: Request, command: ChunkCommand, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, RequestFailed):
            kind = HandoffFailed if isinstance(outcome, HandoffFailed) else PrefillFailed
            self._end(request, kind(str(outcome)))
            return
        if request.ended:
            return
        so_far, total = request.account.report(now), request.job.tokens
        request.events.put_nowait(ChunkRead(tokens_done=request.done, tokens_total=total, so_far=so_far))
        if command.last:
            self._end(request, PrefillDone(request_id=command.request_id, report=so_far))

    # --- endings --------------------------------------------------------------------------------------

    def _end(self, request: Request, event: PrefillEvent | PrefillFailed | None) -> asyncio.Future[None]:
        """End a request with this event; do nothing if it has ended. The stages stop its chunks in flight. If
        the stages have opened the request and the group is not lost, the close command follows those chunks.

        Returns:
            A future that is done when the request's pages are free.
        """
        if request.closing is None:
            request.disarm()
            request.end_span(event, self._clock())
            if event is not None:
                request.events.put_nowait(event)
            closed: list[asyncio.Task[Any]] = []
            if request.in_flight:  # also if the group is lost: then its stages can leave it earlier
                self._pipeline.abandon(request.serial)
            if request.opened and not self.failure:
                closed = self._pipeline.close(request.job.request_id)
            request.closing = self._pipeline.spawn(self._close(request, closed))
        return asyncio.shield(request.closing)

    async def _close(self, request: Request, closed: list[asyncio.Task[Any]]) -> None:
        try:
            while not all(await asyncio.gather(*closed)):
                await asyncio.sleep(_ASK_AGAIN_S)
                if self.failure:  # a stage may be dead
                    break
                closed = self._pipeline.close(request.job.request_id)
        except Exception as error:
            self._fail(error)
        self._requests.remove(request)
        self._pump()

    def _hangs(self, stage: int, fault: str) -> None:
        self._fail(RuntimeError(fault), stage)

    def _fail(self, error: Exception, hanging: int | None = None) -> None:
        if self.failure:
            return
        text = str(error).strip().splitlines()
        self.failure = f"prefill group {self.name} is lost: {text[0] if text else type(error).__name__}"
        for request in self._requests:
            self._end(request, PrefillFailed(self.failure))
        self._end_stages(hanging)
