"""The gRPC service of a door.

Serve drops the trailing metadata of a method that raises, so a method sets its status and returns. Serve's
proxy sends the status with the stream's last message, so every stream ends with an empty message, which
`registration` removes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.door.edges.grpc_chat import AnswerParser, parsing, read_request
from deltafront.service.door.registration import SERVICE, UndecodedMessage
from deltafront.service.door.status import set_status
from deltafront.service.door.wire import response, write
from deltafront.service.errors import DeltafrontError, NotFound, TooLong, shown
from deltafront.service.request.answers import RequestEvent, Resumed
from deltafront.service.request.calls import GenerateRequest, PrefillRequest
from deltafront.service.request.context import Accepted
from deltafront.service.request.handler import Headers, RequestHandler
from deltafront.workers.messages.events import Usage

_HEALTH_WATCH_S = 1.0
_M = TypeVar("_M", bound=Message)


def _answering(rpc: str, kind: type[_M]) -> Callable[..., AsyncIterator[_M]]:
    async def method(self: FrontDoor, request: UndecodedMessage, grpc_context: Any) -> AsyncIterator[_M]:
        requests, metadata = self._requests, grpc_context.invocation_metadata()
        with _status_on(grpc_context):
            async with requests.accept(
                rpc, metadata, request_id=request.request_id, size=request.size
            ) as accepted:
                stream, parser = await self._begin(accepted, request)
                async with contextlib.aclosing(stream) as events:
                    async for event in events:
                        told = event if parser is None else parser.parsed(event)
                        if not isinstance(told, Usage | Resumed):
                            yield response(kind, told)
        yield kind()  # carries the status

    return method


class FrontDoor:
    """The gRPC service of a door. Health is answered on any event loop, everything else on the one that
    created the door.
    """

    def __init__(self, requests: RequestHandler) -> None:
        self._requests = requests
        self._loop = asyncio.get_running_loop()

    def owner(self, rpc: str, metadata: Headers) -> str:
        """Authenticate a call before its message is received, and return the caller's owner id. Raises
        Unauthenticated."""
        return self._requests.owner(rpc, metadata)

    Prefill = _answering("Prefill", pb.PrefillResponse)
    Generate = _answering("Generate", pb.GenerateResponse)

    async def CancelRequest(self, request: UndecodedMessage, grpc_context: Any) -> pb.CancelRequestResponse:
        ended = 0
        with _status_on(grpc_context):
            metadata = grpc_context.invocation_metadata()
            async with self._requests.accept("CancelRequest", metadata, counted=False) as accepted:
                ended = await self._requests.cancel_request(accepted, self._message(request).request_id)
        return pb.CancelRequestResponse(requests=ended)

    async def ReleaseSession(self, request: UndecodedMessage, grpc_context: Any) -> pb.ReleaseSessionResponse:
        with _status_on(grpc_context):
            metadata = grpc_context.invocation_metadata()
            async with self._requests.accept("ReleaseSession", metadata, counted=False) as accepted:
                await self._requests.release_session(accepted, self._message(request).session_id)
        return pb.ReleaseSessionResponse()

    async def GetServerInfo(self, request: UndecodedMessage, grpc_context: Any) -> pb.GetServerInfoResponse:
        answer = pb.GetServerInfoResponse()
        with _status_on(grpc_context):
            metadata = grpc_context.invocation_metadata()
            async with self._requests.accept("GetServerInfo", metadata, counted=False):
                self._message(request)
                answer = write(pb.GetServerInfoResponse, await self._requests.server_info())
        return answer

    async def List(self, request: UndecodedMessage, grpc_context: Any) -> health_pb2.HealthListResponse:
        answer = health_pb2.HealthListResponse()
        with _status_on(grpc_context):
            self._message(request)
            health = health_pb2.HealthCheckResponse(status=await self._health())
            answer = health_pb2.HealthListResponse(statuses={"": health, SERVICE.full_name: health})
        return answer

    async def Check(self, request: UndecodedMessage, grpc_context: Any) -> health_pb2.HealthCheckResponse:
        answer = health_pb2.HealthCheckResponse()
        with _status_on(grpc_context):
            service = self._message(request).service
            if not _known_service(service):
                raise NotFound(f"there is no service {shown(service)} here")
            answer = health_pb2.HealthCheckResponse(status=await self._health())
        return answer

    async def Watch(
        self, request: UndecodedMessage, grpc_context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield the health status whenever it changes, until `registration.py` ends the stream."""
        last: Any = None
        service: Any = None
        with _status_on(grpc_context):
            service = self._message(request).service
        if service is None:
            yield health_pb2.HealthCheckResponse()  # carries the status
            return
        while True:
            unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            status = await self._health() if _known_service(service) else unknown
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            await asyncio.sleep(_HEALTH_WATCH_S)

    async def _begin(
        self, accepted: Accepted, sent: UndecodedMessage
    ) -> tuple[AsyncGenerator[RequestEvent, None], AnswerParser | None]:
        """Run a request. Returns its events, and the parser of its answer if the request asks for one."""
        request, parser = await self._read(sent), None
        if isinstance(request, GenerateRequest) and (request.parse_answer or request.tools):
            request, parser = await parsing(self._requests, request, sent.size)
        return self._requests.run(accepted, request), parser

    async def _read(self, sent: UndecodedMessage) -> PrefillRequest:
        """Parse a request in a thread, because a large one takes long. Raises the errors of `_message`."""
        return await self._requests.text_budget.work(sent.size, lambda _: read_request(self._message(sent)))

    def _message(self, sent: UndecodedMessage) -> Any:
        """Decode a request. Raises InvalidArgument, or TooLong before it decodes a long message."""
        limit = self._requests.max_request_bytes
        if sent.size > limit:
            raise TooLong("request", f"{sent.size} bytes cannot fit this model: at most {limit} do")
        return sent.read()

    async def _health(self) -> health_pb2.HealthCheckResponse.ServingStatus:
        """Run the health check on the door's own event loop, so that a door that hangs is not healthy."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ready(), self._loop))

    async def _ready(self) -> health_pb2.HealthCheckResponse.ServingStatus:
        reply = health_pb2.HealthCheckResponse
        return reply.SERVING if self._requests.ready else reply.NOT_SERVING


@contextlib.contextmanager
def _status_on(context: Any) -> Iterator[None]:
    """Turn an error that ends the block into the call's status."""
    try:
        yield
    except DeltafrontError as error:
        set_status(context, error)


def _known_service(name: str) -> bool:
    return name in ("", SERVICE.full_name)
