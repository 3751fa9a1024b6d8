"""The gRPC edge: contexts, messages and statuses, and nothing else.

Method names are those of the contract (and of grpc.health.v1), since Serve dispatches by name. A method sets
its status and returns instead of raising, because Serve drops the trailing metadata (`retry-after`) of what
raises. Where its proxy is between (HAProxy's fallback while doors change), the status of a stream is what
came with the last message, so that an error after it would look like a good end. So every stream ends with
an empty message, which `registration` leaves out of what the client gets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from ...protos.v1 import deltafront_pb2 as pb
from ...workers.messages.events import Usage
from ..errors import DeltafrontError, NotFound, TooLong
from ..request.run import Requests
from .registration import SERVICE, Sent
from .status import details, status, trailers
from .wire import (
    generate_response,
    prefill_response,
    read_generate_request,
    read_prefill_request,
    server_info,
)

_HEALTH_WATCH_S = 1.0
_M = TypeVar("_M", bound=Message)
_R = TypeVar("_R")


class Context(Protocol):
    """What is used of gRPC's (or Serve's) servicer context."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...


class FrontDoor:
    """The servicer of DeltafrontService and of Health."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    async def Prefill(
        self, request: Sent[pb.PrefillRequest], grpc_context: Context
    ) -> AsyncIterator[pb.PrefillResponse]:
        stream = self._requests.prefill(
            grpc_context.invocation_metadata(),
            self._reader(request, read_prefill_request),
            request.size,
            request.request_id,
        )
        with _StatusOn(grpc_context):
            async with contextlib.aclosing(stream) as events:
                async for event in events:
                    yield prefill_response(event)
        yield pb.PrefillResponse()  # takes the status along

    async def Generate(
        self, request: Sent[pb.GenerateRequest], grpc_context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        stream = self._requests.generate(
            grpc_context.invocation_metadata(),
            self._reader(request, read_generate_request),
            request.size,
            request.request_id,
        )
        with _StatusOn(grpc_context):
            async with contextlib.aclosing(stream) as events:
                async for event in events:
                    if not isinstance(event, Usage):
                        yield generate_response(event)
        yield pb.GenerateResponse()  # takes the status along

    async def CancelRequest(
        self, request: Sent[pb.CancelRequestRequest], grpc_context: Context
    ) -> pb.CancelRequestResponse:
        ended = 0
        read = self._reader(request, lambda readable: readable.request_id)
        with _StatusOn(grpc_context):
            ended = await self._requests.cancel_request(grpc_context.invocation_metadata(), read)
        return pb.CancelRequestResponse(requests=ended)

    async def ReleaseSession(
        self, request: Sent[pb.ReleaseSessionRequest], grpc_context: Context
    ) -> pb.ReleaseSessionResponse:
        read = self._reader(request, lambda readable: readable.session_id)
        with _StatusOn(grpc_context):
            await self._requests.release_session(grpc_context.invocation_metadata(), read)
        return pb.ReleaseSessionResponse()

    async def GetServerInfo(
        self, request: Sent[pb.GetServerInfoRequest], grpc_context: Context
    ) -> pb.GetServerInfoResponse:
        answer = pb.GetServerInfoResponse()
        read = self._reader(request, lambda readable: readable)
        with _StatusOn(grpc_context):
            answer = server_info(await self._requests.server_info(grpc_context.invocation_metadata(), read))
        return answer

    async def List(
        self, request: Sent[health_pb2.HealthListRequest], grpc_context: Context
    ) -> health_pb2.HealthListResponse:
        answer = health_pb2.HealthListResponse()
        with _StatusOn(grpc_context):
            self._reader(request, lambda readable: readable)()
            one = health_pb2.HealthCheckResponse(status=self._health())
            answer = health_pb2.HealthListResponse(statuses={"": one, SERVICE.full_name: one})
        return answer

    async def Check(
        self, request: Sent[health_pb2.HealthCheckRequest], grpc_context: Context
    ) -> health_pb2.HealthCheckResponse:
        answer = health_pb2.HealthCheckResponse()
        with _StatusOn(grpc_context):
            service = self._reader(request, _service)()
            if not _known_service(service):
                raise NotFound(f"there is no service {service!r} here")
            answer = health_pb2.HealthCheckResponse(status=self._health())
        return answer

    async def Watch(
        self, request: Sent[health_pb2.HealthCheckRequest], grpc_context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status, and again whenever it changes, until the client leaves."""
        last, service = None, None
        with _StatusOn(grpc_context):
            service = self._reader(request, _service)()
        if service is None:
            yield health_pb2.HealthCheckResponse()  # takes the status along
            return
        while True:
            unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            status = self._health() if _known_service(service) else unknown
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            await asyncio.sleep(_HEALTH_WATCH_S)

    def _reader(self, message: Sent[_M], read: Callable[[_M], _R]) -> Callable[[], _R]:
        most = self._requests.most_bytes

        def readable() -> _R:
            if message.size > most:
                raise TooLong("request", f"{message.size} bytes cannot fit this model: at most {most} do")
            return read(message.read())

        return readable

    def _health(self) -> health_pb2.HealthCheckResponse.ServingStatus:
        reply = health_pb2.HealthCheckResponse
        return reply.SERVING if self._requests.ready else reply.NOT_SERVING


class _StatusOn:
    """An error that ends the block becomes the call's status. (`contextlib.contextmanager` would hide from
    the type checker that what follows the block is reached.)"""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, DeltafrontError):
            return False
        self._context.set_code(status(error))
        self._context.set_details(details(error))
        self._context.set_trailing_metadata(trailers(error))
        return True


def _service(request: health_pb2.HealthCheckRequest) -> str:
    return str(request.service)


def _known_service(name: str) -> bool:
    return name in ("", SERVICE.full_name)
