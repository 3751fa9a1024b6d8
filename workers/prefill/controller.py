"""The head of a prefill group: which chunk runs next, and how a request ends.

One asyncio class without Ray or torch. Every decision is made on the event loop between two awaits and sent
to all stages at once, so stages get the same commands in the same order: that is what makes cancelling
safe in a pipeline whose stages pass tensors on without headers.

At most one chunk per stage is in flight, and one enters when the first stage has passed on the one before.
That fills the pipeline, and bounds how long somebody else's chunks stand between a request and its pages:
one chunk's way through all stages. Its own chunks are abandoned within a layer's time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...kernels.constants import BLOCK
from ..kv.page_pool import PagePool, pages_for
from ..messages import (
    ChunkCommand,
    ChunkReport,
    GroupStats,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillJob,
    Progress,
    RefusalReason,
    Refused,
    RequestFailed,
)
from ..roles import Answer, PrefillEvent, Stage, settled
from ..settings import PrefillConfig
from . import schedule
from .account import Throughput
from .request import Request, refusal

T = TypeVar("T")


class PrefillController:
    """Runs prompts through a group's stages, several at a time, chunk by chunk.

    end_stages: ends all of them, even in the middle of a chunk; every answer that they still owe then becomes
    an error. clock: seconds, for scheduling and accounts.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        config: PrefillConfig,
        end_stages: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if config.chunk_tokens < BLOCK or config.chunk_tokens % BLOCK:
            raise ValueError(f"chunk_tokens {config.chunk_tokens} is not a multiple of {BLOCK}")
        self.name = name
        self._stages = tuple(stages)
        self._config = config
        self._end_stages = end_stages
        self._clock = clock
        self._pool = PagePool(pages_for(config.cache_tokens))
        self._requests: dict[str, Request] = {}
        self._in_flight = 0
        self._entry_busy = False
        self._serials = itertools.count(1)
        self._throughput = Throughput()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._failure = ""

    @property
    def failure(self) -> str:
        """Why the group is dead; empty while it lives."""
        return self._failure

    async def prefill(self, job: PrefillJob) -> AsyncGenerator[PrefillEvent, None]:
        """Progress after each chunk, then one PrefillDone; or one Refused.

        Raises PrefillFailed (PrefillCancelled). The stream ends when the request's pages are free on every
        stage; closing it early cancels the request.
        """
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

    async def cancel(self, request_id: str) -> None:
        """End a request; returns when its pages are free. Unknown ids are fine."""
        request = self._requests.get(request_id)
        if request is not None:
            await self._end(request, PrefillCancelled(f"prefill of {request_id} was cancelled"))

    async def renew(self, request_ids: Iterable[str]) -> None:
        """Their door is still there; unknown ids are fine."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and not request.ended:
                self._arm_lease(request)

    async def stats(self) -> GroupStats:
        """Raises PrefillFailed once the group is lost, so that no door sends it anything more."""
        if self._failure:
            raise PrefillFailed(self._failure)
        live = [request for request in self._requests.values() if not request.ended]
        running = sum(request.opened for request in live)
        return GroupStats(
            name=self.name,
            pages_total=self._pool.total,
            pages_free=self._pool.free,
            running=running,
            waiting=len(live) - running,
            waiting_tokens=sum(request.job.tokens - request.done for request in live),
            tokens_per_second=self._throughput.tokens_per_second,
        )

    async def check(self) -> str:
        """`failure`, after asking idle stages whether they live. Busy ones are not asked: the death of one
        shows in the chunk it owes."""
        if not self._failure and not self._requests:
            try:
                await self.stage_pages()
            except Exception as error:
                self._fail(error)
        return self._failure

    async def stage_pages(self) -> list[int]:
        """Pages of open requests by stage, each asked behind the commands it already has."""
        return list(await asyncio.gather(*[settled(stage.pages_used()) for stage in self._stages]))

    async def stop(self) -> None:
        """Take the group down: running requests fail, stages end."""
        self._fail(RuntimeError("the group is being stopped"))
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- admission ------------------------------------------------------------------------------------

    def _admit(self, job: PrefillJob) -> Request | Refused:
        if self._failure:
            raise PrefillFailed(self._failure)
        if len(job.token_ids) % 4 or not job.tokens:
            raise PrefillFailed(f"{len(job.token_ids)} bytes are not a prompt: token ids take 4 bytes each")
        refused = refusal(job, job.request_id in self._requests, self._pool)
        if refused is not None:
            return refused
        pages = self._pool.allocate(pages_for(job.tokens))
        request = Request(job, pages, len(self._stages), self._clock(), next(self._serials))
        self._requests[job.request_id] = request
        self._arm_lease(request)
        if job.deadline is not None:
            late = Refused(RefusalReason.DEADLINE, "the deadline passed during prefill")
            request.after(job.deadline - time.time(), "deadline", lambda: self._end(request, late))
        return request

    def _arm_lease(self, request: Request) -> None:
        lease = self._config.stream_lease_s
        lost = PrefillCancelled(f"nobody has asked for {request.job.request_id} for {lease:g} s")
        request.after(lease, "lease", lambda: self._end(request, lost))

    # --- the pipeline ---------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send a chunk if the first stage is free and somebody waits. Called whenever either may have
        changed."""
        while not self._failure and not self._entry_busy and self._in_flight < len(self._stages):
            waiting = [request.waiting for request in self._requests.values() if request.unsent]
            if not waiting:
                return
            chosen = schedule.next_request(waiting, self._clock(), self._config.ageing_tokens_per_second)
            try:
                self._send_chunk(self._requests[chosen])
            except Exception as error:
                self._fail(error)

    def _send_chunk(self, request: Request) -> None:
        now = self._clock()
        opening: list[Answer[Any]] = []
        if not request.opened:
            request.opened = True
            request.account.began = now
            order = request.open_request()
            opening = [stage.open(order) for stage in self._stages]
        command = request.next_chunk(self._config.chunk_tokens)
        request.waiting = schedule.chunk_sent(
            request.waiting, command.tokens, now, self._config.ageing_tokens_per_second
        )
        request.in_flight += 1
        self._in_flight += 1
        blind = replace(command, token_ids=b"")
        first, *others = self._stages
        replies = [first.run_chunk(command), *(stage.run_chunk(blind) for stage in others)]
        self._entry_busy = True
        outcomes = [self._spawn(outcome(reply)) for reply in (*opening, *replies)]
        outcomes[len(opening)].add_done_callback(self._entry_free)
        self._watching = self._spawn(self._watch(request, command, now, outcomes, self._watching))

    def _entry_free(self, entry: asyncio.Future[Any]) -> None:
        """The first stage has passed its chunk on. A failure of the group shows in `_watch`."""
        self._entry_busy = False
        if not entry.cancelled() and entry.exception() is None:
            self._pump()

    async def _watch(
        self,
        request: Request,
        command: ChunkCommand,
        sent: float,
        outcomes: list[asyncio.Task[Any]],
        before: asyncio.Task[None] | None,
    ) -> None:
        """A chunk's end. Stages finish chunks in order, but the event loop may learn of two at once and of
        the later one first, so each waits for the one `before`."""
        try:
            done = await asyncio.gather(*outcomes)
            if before is not None:
                await asyncio.wait([before])
            self._chunk_done(request, command, sent, done)
        except Exception as error:
            self._fail(error)
        self._pump()

    def _chunk_done(self, request: Request, command: ChunkCommand, sent: float, outcomes: list[Any]) -> None:
        now = self._clock()
        self._in_flight -= 1
        request.in_flight -= 1
        if not request.in_flight:
            request.waiting = schedule.became_idle(request.waiting, now)
        failures = [outcome for outcome in outcomes if isinstance(outcome, RequestFailed)]
        if failures:
            self._end(request, PrefillFailed(str(failures[0])))
            return
        reports: list[ChunkReport] = outcomes[-len(self._stages) :]
        self._throughput.chunk(command.tokens, sent, now)
        for other in self._requests.values():
            if other is not request:
                other.account.other_chunk(reports[-1].wall, now)
        request.account.own_chunk(reports)
        request.done = command.start + command.tokens
        if request.ended:
            return
        progress = Progress(request.done, request.job.tokens)
        request.events.put_nowait(progress)
        if command.last:
            self._end(request, PrefillDone(command.request_id, request.account.report(now)))

    # --- endings --------------------------------------------------------------------------------------

    def _end(self, request: Request, event: PrefillEvent | PrefillFailed | None) -> asyncio.Future[None]:
        """End a request once, with this event; returns what to await for its pages to be free.

        The close command goes to all stages here and now, behind the chunks that they already have.
        """
        if request.closing is None:
            request.disarm()
            if event is not None:
                request.events.put_nowait(event)
            replies: list[Answer[None]] = []
            if request.opened and not self._failure:
                if request.in_flight:
                    for stage in self._stages:
                        stage.abandon(request.serial)
                replies = [stage.close(request.job.request_id) for stage in self._stages]
            request.closing = self._spawn(self._close(request, replies))
        return asyncio.shield(request.closing)

    async def _close(self, request: Request, replies: list[Answer[None]]) -> None:
        """Wait for every stage before the pages go to somebody else."""
        try:
            await asyncio.gather(*[self._spawn(outcome(reply)) for reply in replies])
        except Exception as error:
            self._fail(error)
        del self._requests[request.job.request_id]
        self._pool.release(request.pages)

    def _fail(self, error: Exception) -> None:
        """The group is lost: every request ends with the same message, and no stage survives."""
        if self._failure:
            return
        text = str(error).strip().splitlines()
        self._failure = f"prefill group {self.name} is lost: {text[0] if text else type(error).__name__}"
        for request in list(self._requests.values()):
            self._end(request, PrefillFailed(self._failure))
        self._end_stages()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of the controller's own, so that it outlives the caller that caused it, and `stop` waits."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def outcome(answer: Answer[T]) -> T | RequestFailed:
    """A stage's answer; one request's failure as a value, the group's as an exception."""
    try:
        return await settled(answer)
    except RequestFailed as error:
        return error
