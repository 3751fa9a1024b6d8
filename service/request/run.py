"""Requests as every edge runs them: authenticate, check, run, and end with exactly one outcome.

A request runs as a task that puts its events into a queue, so that whoever reads the stream may vanish at
any moment: closing the stream cancels the task, wherever it is.

A new edge (another protocol) must: hand on the caller's headers and a function that reads the request into
its plain form (called once the caller is known; it raises InvalidArgument for what cannot be read); close
the stream (`aclose`) when its client goes away; turn each event into a message of its own and the one
DeltafrontError that may end a stream into its own status, by the error's code, `retry_after_s` included.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from ..errors import Cancelled, DeltafrontError, Internal, InvalidArgument, NotFound
from ..fleet.sessions import NO_SESSION, worker_of
from .answers import RequestEvent, ServerInfo
from .attempt import Emit, Resources, within
from .calls import GenerateRequest, PrefillRequest
from .check import Limits, generate_call, prefill_call
from .generate import Generation
from .prefill import Prefilling
from .timings import TtftClock

log = logging.getLogger(__name__)

Headers = Iterable[tuple[str, str | bytes]]
"""What came beside a request: gRPC's metadata, HTTP's headers."""
Authenticate = Callable[[Headers], str]
"""Headers → the caller's name as an owner of sessions. Raises Unauthenticated."""
_Work = Callable[[str, TtftClock, Emit], Coroutine[Any, Any, None]]
"""owner, clock, emit → runs the request."""


class Requests:
    """What an edge may ask. about: the server without its workers."""

    def __init__(
        self, resources: Resources, limits: Limits, authenticate: Authenticate, about: ServerInfo
    ) -> None:
        self._resources = resources
        self._limits = limits
        self._authenticate = authenticate
        self._about = about

    @property
    def ready(self) -> bool:
        """Whether every configured role has at least one started member."""
        return self._resources.fleet.view.ready

    @property
    def model(self) -> str:
        """The name of the model that is served."""
        return self._about.model

    def prefill(
        self, headers: Headers, read: Callable[[], PrefillRequest]
    ) -> AsyncGenerator[RequestEvent, None]:
        """Progress …, PrefillFinished. Raises DeltafrontError."""

        async def work(owner: str, clock: TtftClock, emit: Emit) -> None:
            call = prefill_call(read(), owner, self._limits)
            async with within(call.deadline):
                await Prefilling(self._resources, call, clock, emit).run()

        return self._run("Prefill", headers, work)

    def generate(
        self, headers: Headers, read: Callable[[], GenerateRequest]
    ) -> AsyncGenerator[RequestEvent, None]:
        """Progress …, Token …, GenerateFinished. Raises DeltafrontError."""

        async def work(owner: str, clock: TtftClock, emit: Emit) -> None:
            call = generate_call(read(), owner, self._limits)
            async with within(call.deadline):
                await Generation(self._resources, call, clock, emit).run()

        return self._run("Generate", headers, work)

    async def release_session(self, headers: Headers, read: Callable[[], str]) -> None:
        """Free a session's pages now; `read` gives its id. Raises DeltafrontError."""

        async def work(owner: str, _clock: TtftClock, _emit: Emit) -> None:
            session_id = read()
            if not session_id:
                raise InvalidArgument("session_id", "is empty")
            worker = await self._resources.fleet.session_worker(worker_of(session_id))
            if not await worker.release_session(session_id, owner):
                raise NotFound(NO_SESSION)

        async for _event in self._run("ReleaseSession", headers, work):
            pass

    async def server_info(self, headers: Headers, read: Callable[[], object]) -> ServerInfo:
        """The server and its workers now. Raises DeltafrontError."""

        async def work(_owner: str, _clock: TtftClock, _emit: Emit) -> None:
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

    async def _run(self, rpc: str, headers: Headers, work: _Work) -> AsyncGenerator[RequestEvent, None]:
        """Events of a request until it ends; rpc: its name in metrics."""
        clock = TtftClock()
        events: asyncio.Queue[RequestEvent | None] = asyncio.Queue()

        async def run() -> None:
            try:
                await work(self._authenticate(headers), clock, events.put_nowait)
            finally:
                events.put_nowait(None)

        task = asyncio.create_task(run())
        error: DeltafrontError | None = Cancelled("the client went away")
        try:
            while (event := await events.get()) is not None:
                yield event
            error = await _outcome(task)
        finally:
            if not task.done():
                task.cancel()
            self._resources.metrics.ended(rpc, error.code if error else "finished", clock.elapsed)
        if error is not None:
            raise error


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
