"""Requests as every edge runs them: authenticate, check, count, run, and end with exactly one outcome and one
line in the audit log.

A request runs as a task that puts its events into a queue, so that whoever reads the stream may vanish at
any moment: closing the stream cancels the task, wherever it is.

A new edge (another protocol) must: hand on the caller's headers and a function that reads the request into
its plain form (called once the caller is known; it raises InvalidArgument for what cannot be read); close
the stream (`aclose`) when its client goes away; turn each event into a message of its own and the one
DeltafrontError that may end a stream into its own status, by the error's code, `retry_after_s` included.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from ..errors import Cancelled, DeltafrontError, Internal, InvalidArgument, NotFound, WorkerLost
from ..fleet.sessions import NO_SESSION, worker_of
from ..metrics import FINISHED
from .answers import GenerateFinished, PrefillFinished, RequestEvent, ServerInfo
from .attempt import Emit, Resources, within
from .audit import Audit
from .callers import Caller, Callers, Share
from .calls import GenerateRequest, PrefillRequest
from .check import Limits, fit_id, generate_call, prefill_call
from .generate import Generation
from .prefill import Prefilling
from .texts import Texts
from .timings import TtftClock

log = logging.getLogger(__name__)

_BESIDE_TEXT = 1 << 20
"""Bytes of a request that are not its text."""
Headers = Iterable[tuple[str, str | bytes]]
"""What came beside a request: gRPC's metadata, HTTP's headers."""
Authenticate = Callable[[Headers], Caller]
"""Raises Unauthenticated."""
EndElsewhere = Callable[[str, str], Awaitable[int]]
"""Owner, request id → has the other doors `end` such requests; how many they had."""


@dataclass(eq=False)
class RunningRequest:
    """A request from its arrival to its outcome. trace: the `traceparent` of what workers do for it.
    request_id: the client's; empty until it has been read."""

    caller: Caller
    clock: TtftClock
    emit: Emit
    task: asyncio.Task[None]
    audit: Audit
    trace: str
    request_id: str = ""

    @property
    def owner(self) -> str:
        return self.caller.owner


_Work = Callable[[RunningRequest], Coroutine[Any, Any, None]]


async def nowhere_else(_owner: str, _request_id: str) -> int:
    """For a door that is alone."""
    return 0


class Requests:
    """What an edge may ask. about: the server without its workers."""

    def __init__(
        self,
        resources: Resources,
        limits: Limits,
        authenticate: Authenticate,
        about: ServerInfo,
        end_elsewhere: EndElsewhere = nowhere_else,
    ) -> None:
        self._resources = resources
        self._limits = limits
        self._authenticate = authenticate
        self._about = about
        self._end_elsewhere = end_elsewhere
        self.texts = Texts(resources.settings.text_bytes)
        self._running: set[RunningRequest] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        """Also those whose stream was left: they end a moment later."""
        fleet = resources.fleet
        self._callers = Callers(
            resources.door,
            lambda: (use for worker in fleet.view.workers.values() for use in worker.uses),
            fleet.ask,
            resources.settings.max_requests,
        )

    @property
    def ready(self) -> bool:
        """Whether every configured role has at least one started member."""
        return self._resources.fleet.view.ready

    @property
    def model(self) -> str:
        """The name of the model that is served."""
        return self._about.model

    def prefill(
        self, headers: Headers, read: Callable[[], PrefillRequest], size: int, request_id: str = ""
    ) -> AsyncGenerator[RequestEvent, None]:
        """Progress …, PrefillFinished. read: called once. size: in bytes, of the request as it came.
        request_id: what the edge knows of it before anything is checked, for the audit log. Raises
        DeltafrontError."""

        async def work(running: RunningRequest) -> None:
            with self.texts.hold(running.owner, size) as held:
                call = replace(prefill_call(read(), running.owner, self._limits), trace=running.trace)
                counted = self._counted(running, call.request_id, call.method.name)
                async with counted as share, within(call.deadline):
                    prefilling = Prefilling(self._resources, call, running.clock, running.emit, share, held)
                    del call
                    await prefilling.run()

        return self._run("Prefill", headers, work, request_id)

    def generate(
        self, headers: Headers, read: Callable[[], GenerateRequest], size: int, request_id: str = ""
    ) -> AsyncGenerator[RequestEvent, None]:
        """Progress …, Usage, Token …, GenerateFinished. read, size, request_id: as for `prefill`. Raises
        DeltafrontError."""

        async def work(running: RunningRequest) -> None:
            with self.texts.hold(running.owner, size) as held:
                call = replace(generate_call(read(), running.owner, self._limits), trace=running.trace)
                method = "" if call.prompt is None else call.method.name
                counted = self._counted(running, call.request_id, method)
                async with counted as share, within(call.deadline) as limit:
                    generation = Generation(
                        self._resources, call, running.clock, running.emit, share, limit, held
                    )
                    del call
                    await generation.run()

        return self._run("Generate", headers, work, request_id)

    async def cancel_request(self, headers: Headers, read: Callable[[], str]) -> int:
        """End the caller's requests of the id that `read` gives, at every door; how many there were. Raises
        DeltafrontError."""
        ended = 0

        async def work(running: RunningRequest) -> None:
            nonlocal ended
            request_id = read()
            if not request_id:
                raise InvalidArgument("request_id", "is empty")
            ended = self.end(running.owner, request_id)
            ended += await self._end_elsewhere(running.owner, request_id)

        async for _event in self._run("CancelRequest", headers, work):
            pass
        return ended

    def end(self, owner: str, request_id: str) -> int:
        """Cancel this door's requests of an owner's id; how many there were."""
        named = [one for one in self._running if (one.owner, one.request_id) == (owner, request_id)]
        return sum(one.task.cancel() for one in named)

    async def stop(self) -> None:
        """Cancel what still runs; returns when every request has ended."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        self.texts.stop()

    async def release_session(self, headers: Headers, read: Callable[[], str]) -> None:
        """Free a session's pages now; `read` gives its id. Raises DeltafrontError."""

        async def work(running: RunningRequest) -> None:
            session_id = read()
            if not session_id:
                raise InvalidArgument("session_id", "is empty")
            worker = await self._resources.fleet.session_worker(worker_of(session_id))
            if not await worker.release_session(session_id, running.owner):
                raise NotFound(NO_SESSION)

        async for _event in self._run("ReleaseSession", headers, work):
            pass

    async def server_info(self, headers: Headers, read: Callable[[], object]) -> ServerInfo:
        """The server and its workers now. Raises DeltafrontError."""

        async def work(_running: RunningRequest) -> None:
            read()
            await self._resources.fleet.poll()

        async for _event in self._run("GetServerInfo", headers, work):
            pass
        view = self._resources.fleet.view
        groups, workers = tuple(view.groups.values()), tuple(view.workers.values())
        return replace(
            self._about,
            prefill_groups=len(groups),
            decode_workers=len(workers),
            decode_pages_total=sum(w.pages_total for w in workers),
            decode_pages_free=sum(w.pages_free for w in workers),
            prefill_pages_total=sum(g.pages_total for g in groups),
            prefill_pages_free=sum(g.pages_free for g in groups),
            page_tokens=workers[0].page_tokens if workers else 0,
        )

    def owner(self, headers: Headers) -> str:
        """Of what comes with these headers. Raises Unauthenticated."""
        return self._authenticate(headers).owner

    @property
    def most_bytes(self) -> int:
        """Most bytes of a request that may fit the model: prompt, appended text and all fields."""
        return 2 * self._limits.most_characters + _BESIDE_TEXT

    def _counted(
        self, running: RunningRequest, request_id: str, method: str
    ) -> AbstractAsyncContextManager[Share]:
        """A request that has been read, among its caller's others."""
        running.request_id = running.audit.request_id = request_id
        running.audit.method = method
        return self._callers.request(running.caller)

    async def _run(
        self, rpc: str, headers: Headers, work: _Work, request_id: str = ""
    ) -> AsyncGenerator[RequestEvent, None]:
        """Events of a request until it ends; rpc: its name in metrics."""
        clock, audit, headers = TtftClock(), Audit(rpc), tuple(headers)
        audit.request_id = request_id if fit_id(request_id) else ""
        trace = self._resources.tracing.begin(rpc, headers, lambda: clock.elapsed)
        audit.trace_id = trace.trace_id
        events: asyncio.Queue[RequestEvent | None] = asyncio.Queue()
        owner = ""

        async def run() -> None:
            nonlocal owner
            me = asyncio.current_task()
            assert me is not None, "it runs as a task"
            try:
                caller = self._authenticate(headers)
                running = RunningRequest(caller, clock, events.put_nowait, me, audit, trace.context)
                audit.caller, owner = running.caller.name, running.owner
                self._running.add(running)
                try:
                    await work(running)
                finally:
                    self._running.discard(running)
            finally:
                events.put_nowait(None)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        error: DeltafrontError | None = Cancelled("the client went away")
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, PrefillFinished | GenerateFinished):
                    event = replace(event, trace_id=trace.trace_id)
                audit.note(event)
                yield event
            error = await _outcome(task)
        finally:
            if not task.done():
                task.cancel()
            while not events.empty():
                self._release_unsent(events.get_nowait(), owner)
            outcome, seconds = error.code.value if error else FINISHED, clock.elapsed
            self._resources.metrics.ended(rpc, outcome, seconds)
            trace.conclude(audit.write(outcome, seconds), outcome, clock.intervals)
        if error is not None:
            raise error

    def _release_unsent(self, event: RequestEvent | None, owner: str) -> None:
        """The session of an event that the client left before: nobody knows it."""
        if isinstance(event, PrefillFinished | GenerateFinished) and event.session is not None:
            fleet, session_id = self._resources.fleet, event.session.session_id
            with contextlib.suppress(WorkerLost):
                fleet.release(fleet.worker(worker_of(session_id)), session_id, owner)


async def _outcome(task: asyncio.Task[None]) -> DeltafrontError | None:
    """How a finished request ended; what nobody foresaw is logged here and hidden from the client."""
    try:
        await task
    except DeltafrontError as error:
        return error
    except asyncio.CancelledError:
        if not task.cancelled():
            raise  # it is us who are cancelled
        return Cancelled("the request was cancelled")
    except Exception:
        log.exception("a request failed")
        return Internal("the service failed; its log says why")
    return None
