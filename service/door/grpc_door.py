"""The gRPC methods: thin. Authenticate, check, run, and end with exactly one outcome.

A request runs as a task that puts its events into a queue, so that whoever reads the stream may vanish at
any moment: closing the stream cancels the task, wherever it is. Errors become status codes here and only
here. A method sets its code and returns instead of raising, because Serve drops the trailing metadata
(`retry-after`) of what raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from ...protos.v1 import deltafront_pb2 as pb
from ...workers.messages import PRESETS
from ..errors import Cancelled, DeltafrontError, Internal, InvalidArgument, NotFound, details, trailers
from ..fleet.sessions import NO_SESSION, worker_of
from ..request.attempt import Emit, Resources, within
from ..request.calls import Event
from ..request.generate import Generation
from ..request.prefill import Prefilling
from ..request.timings import TtftClock
from .auth import Authenticator
from .validate import Limits, generate_call, prefill_call
from .wire import SERVICE, Unreadable, generate_response, prefill_response

log = logging.getLogger(__name__)

_HEALTH_WATCH_S = 1.0
_M = TypeVar("_M")


class Context(Protocol):
    """What is used of gRPC's (or Serve's) servicer context."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...


@dataclass(frozen=True)
class About:
    """What GetServerInfo tells beside the workers' state."""

    version: str
    model: str
    prefill_stages: int
    chunk_tokens: int
    metrics_address: str


Work = Callable[[str, TtftClock, Emit], Coroutine[Any, Any, None]]
"""owner, clock, emit → runs the request."""


class FrontDoor:
    """Method names are those of the contract (and of grpc.health.v1), since Serve dispatches by name."""

    def __init__(
        self, resources: Resources, limits: Limits, authenticator: Authenticator, about: About
    ) -> None:
        self._resources = resources
        self._limits = limits
        self._authenticator = authenticator
        self._about = about

    async def Prefill(
        self, request: pb.PrefillRequest, grpc_context: Context
    ) -> AsyncIterator[pb.PrefillResponse]:
        async def work(owner: str, clock: TtftClock, emit: Emit) -> None:
            call = prefill_call(_readable(request), owner, self._limits)
            async with within(call.deadline):
                await Prefilling(self._resources, call, clock, emit).run()

        async with contextlib.aclosing(self._stream("Prefill", grpc_context, work)) as events:
            async for event in events:
                yield prefill_response(event)

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        async def work(owner: str, clock: TtftClock, emit: Emit) -> None:
            call = generate_call(_readable(request), owner, self._limits)
            async with within(call.deadline):
                await Generation(self._resources, call, clock, emit).run()

        async with contextlib.aclosing(self._stream("Generate", grpc_context, work)) as events:
            async for event in events:
                yield generate_response(event)

    async def ReleaseSession(
        self, request: pb.ReleaseSessionRequest, grpc_context: Context
    ) -> pb.ReleaseSessionResponse:
        async def work(owner: str, _clock: TtftClock, _emit: Emit) -> None:
            session_id = _readable(request).session_id
            if not session_id:
                raise InvalidArgument("session_id", "is empty")
            worker = await self._resources.fleet.session_worker(worker_of(session_id))
            if not await worker.release_session(session_id, owner):
                raise NotFound(NO_SESSION)

        async for _event in self._stream("ReleaseSession", grpc_context, work):
            pass
        return pb.ReleaseSessionResponse()

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, grpc_context: Context
    ) -> pb.GetServerInfoResponse:
        async def work(_owner: str, _clock: TtftClock, _emit: Emit) -> None:
            _readable(request)
            await self._resources.fleet.poll()

        async for _event in self._stream("GetServerInfo", grpc_context, work):
            pass
        return self._info()

    async def List(
        self, request: health_pb2.HealthListRequest, grpc_context: Context
    ) -> health_pb2.HealthListResponse:
        one = health_pb2.HealthCheckResponse(status=self._health())
        return health_pb2.HealthListResponse(statuses={"": one, SERVICE.full_name: one})

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> health_pb2.HealthCheckResponse:
        if not _known_service(request.service):
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details(f"there is no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._health())

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status, and again whenever it changes, until the client leaves."""
        last = None
        while True:
            unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            status = self._health() if _known_service(request.service) else unknown
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            await asyncio.sleep(_HEALTH_WATCH_S)

    # --- one request -------------------------------------------------------------------------------------

    async def _stream(self, rpc: str, context: Context, work: Work) -> AsyncGenerator[Event, None]:
        """Events of a request until it ends; then its status is set on the context."""
        clock = TtftClock()
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        async def run() -> None:
            try:
                owner = self._authenticator.owner(context.invocation_metadata())
                await work(owner, clock, events.put_nowait)
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
            outcome = "finished" if error is None else error.code.name.lower()
            self._resources.metrics.ended(rpc, outcome, clock.elapsed)
        if error is not None:
            context.set_code(error.code)
            context.set_details(details(error))
            context.set_trailing_metadata(trailers(error))

    # --- state -------------------------------------------------------------------------------------------

    def _health(self) -> health_pb2.HealthCheckResponse.ServingStatus:
        ready = self._resources.fleet.view.ready
        reply = health_pb2.HealthCheckResponse
        return reply.SERVING if ready else reply.NOT_SERVING

    def _info(self) -> pb.GetServerInfoResponse:
        view, about, limits = self._resources.fleet.view, self._about, self._limits
        groups, workers = tuple(view.groups.values()), tuple(view.workers.values())
        methods = [
            pb.MethodInfo(
                name=name,
                source=preset.source,
                defaults={key: float(option.default) for key, option in preset.options.items()},
            )
            for name, preset in PRESETS.items()
            if not preset.whole_prompt
        ]
        return pb.GetServerInfoResponse(
            version=about.version,
            model=about.model,
            max_positions=limits.positions,
            vocabulary=limits.vocabulary,
            default_method=limits.default_method,
            methods=methods,
            prefill_groups=len(groups),
            prefill_stages=about.prefill_stages,
            decode_workers=len(workers),
            chunk_tokens=about.chunk_tokens,
            decode_pages_total=sum(w.pages_total for w in workers),
            decode_pages_free=sum(w.pages_free for w in workers),
            prefill_pages_total=sum(g.pages_total for g in groups),
            prefill_pages_free=sum(g.pages_free for g in groups),
            page_tokens=workers[0].page_tokens if workers else 0,
            metrics_address=about.metrics_address,
        )


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


def _readable(request: _M) -> _M:
    if isinstance(request, Unreadable):
        raise InvalidArgument("request", request.reason)
    return request


def _known_service(name: str) -> bool:
    return name in ("", SERVICE.full_name)
