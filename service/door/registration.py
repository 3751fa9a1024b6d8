"""Registers the services with a gRPC server, and works around three faults of Serve and gRPC.

- Serve decodes requests before our code runs, and answers INTERNAL to invalid ones. So messages arrive
  undecoded, as `UndecodedMessage`, and the door decodes them once it knows the caller and has room.
- gRPC reads a unary request into memory before it calls a method. So every method takes a stream, and reads
  the first message only when there is room.
- If Serve cannot call a door, it answers with Ray's error message. Serve sets its functions by `_replace`; a
  status that no door set then becomes UNAVAILABLE.

A request that ends before it reaches a door gets its audit line here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.door.fields import has_more_fields, text_of
from deltafront.service.door.status import is_ours, not_ours, set_status
from deltafront.service.errors import Code, DeltafrontError, InvalidArgument, Unauthenticated
from deltafront.service.request.audit import Audit
from deltafront.service.request.callers import ANYONE
from deltafront.service.request.handler import Headers
from deltafront.service.request.places import NewestOnly, ReceiveLimit, first_of, late

if TYPE_CHECKING:
    from deltafront.service.door.grpc_door import FrontDoor

log = logging.getLogger(__name__)

_NO_ERROR = (None, grpc.StatusCode.OK, grpc.StatusCode.OK.value[0])
"""Codes of calls without an error. gRPC stores a code as an enum member or as its number."""
SERVICE = pb.DESCRIPTOR.services_by_name["DeltafrontService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION = "grpc.reflection.v1.ServerReflection"
MESSAGE_SIZE_VARIABLE = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
_QUESTIONS, _QUESTION_S = 16, 5.0
"""The most health checks that are received at once, and the seconds that one may take."""
_WATCHES, _WATCH_S = 128, 300.0
"""The most concurrent Watches, and the seconds after which one ends. Clients then call again."""
_MAX_FIELDS = 1 << 16
_DEFAULT_MESSAGE_BYTES = 16 << 20


@dataclass
class UndecodedMessage:
    """An undecoded message. It can be read once, which frees its bytes."""

    kind: type[Message]
    data: bytes = dataclasses.field(repr=False)
    was_read: bool = False

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def request_id(self) -> str:
        field = self.kind.DESCRIPTOR.fields_by_name.get("request_id")
        return "" if field is None else text_of(self.data, field.number)

    def read(self) -> Message:
        """Decode the message. Raises InvalidArgument for invalid protobuf or text."""
        data, self.data, self.was_read = self.data, b"", True
        name = self.kind.DESCRIPTOR.name
        try:
            if has_more_fields(data, self.kind.DESCRIPTOR, _MAX_FIELDS):
                raise InvalidArgument("request", f"{name} has more than {_MAX_FIELDS} fields")
            return self.kind.FromString(data)
        except (DecodeError, ValueError):
            reason = f"{name} cannot be decoded: invalid protobuf, or text that is not UTF-8"
            raise InvalidArgument("request", reason) from None


class Entrance:
    """Admits a server's calls before their messages are received.

    Args:
        door: The door of this process. None in Serve's proxies, which forward calls to a door.
        mark: Changes a call's metadata before authentication.
        watches_per_connection: Maximum health watches of a connection. None with HAProxy, which shares
            connections and limits each client itself (`haproxy_config.py`).
    """

    of_process: ClassVar[FrontDoor | None] = None

    def __init__(
        self,
        max_message_bytes: int,
        door: FrontDoor | None,
        mark: Callable[[Headers], Headers] = tuple,
        watches_per_connection: int | None = None,
    ) -> None:
        self.door = door
        self.messages = ReceiveLimit(max_message_bytes)
        self.questions = NewestOnly(_QUESTIONS, _QUESTION_S)
        self.watches = NewestOnly(_WATCHES, _WATCH_S, watches_per_connection)
        self._mark = mark

    async def receive(self, rpc: str, requests: AsyncIterator[Any], context: Any) -> Any:
        """Receive a call's message. rpc: empty for health. Raises DeltafrontError."""
        if rpc:
            return await self.messages.receive(self._owner(rpc, context), requests)
        with late(_QUESTION_S), self.questions.call(context.peer()) as call:
            return await call.wait(first_of(requests))

    def _owner(self, rpc: str, context: Any) -> str:
        metadata = context.invocation_metadata() or ()
        return ANYONE if self.door is None else self.door.owner(rpc, self._mark(metadata))


@dataclass(frozen=True, kw_only=True)
class _Handler:
    """gRPC's `RpcMethodHandler`. All requests and answers are streams here, even of one message.

    Args:
        rpc: The name in the audit log; empty for health checks, which have no line.
        behaviour: The door's method, or Serve's function that calls it.
        of_serve: `behaviour` is Serve's function. A status that the door did not set becomes UNAVAILABLE.
    """

    rpc: str
    entrance: Entrance
    behaviour: Callable[[Any, Any], Any]
    streaming: bool
    request_deserializer: Callable[[bytes], Any]
    response_serializer: Callable[[Any], bytes] | None
    of_serve: bool = False
    request_streaming: bool = True
    response_streaming: bool = True
    unary_unary: None = None
    unary_stream: None = None
    stream_unary: None = None

    def _replace(self, **changes: Any) -> _Handler:
        """Return a handler that calls Serve's function, with the stream's first message as the request. Serve
        calls `_replace` to put its functions in place of the door's methods.

        A door answers health checks itself, so that they do not count as Serve's requests.
        """
        if not self.rpc and self.entrance.door is not None:
            return self
        behaviour = changes["unary_stream" if self.streaming else "unary_unary"]
        serializer = changes["response_serializer"]
        return dataclasses.replace(self, behaviour=behaviour, response_serializer=serializer, of_serve=True)

    async def stream_stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        began = time.monotonic()
        try:
            request = await self.entrance.receive(self.rpc, requests, context)
        except Unauthenticated as error:
            set_status(context, error)  # the door has written the audit line
            return
        except DeltafrontError as error:
            log.warning("a request was not received: %s", error.message)
            set_status(context, error)
            self._audit(error.code, began)
            return
        except asyncio.CancelledError:  # the client left, or its message is longer than gRPC takes
            self._audit(Code.CANCELLED, began)
            raise
        with self._our_status(request, context) if self.of_serve else contextlib.nullcontext():
            if not self.streaming:
                yield await self.behaviour(request, context)
                return
            messages = self.behaviour(request, context)
            if not self.rpc:
                messages = self._watched(messages, context)
            async with contextlib.aclosing(messages):
                async for message in messages:
                    # An empty message only carries a status to Serve. Serve's messages are bytes.
                    if message if isinstance(message, bytes) else message.ByteSize():
                        yield message

    async def _watched(self, messages: AsyncGenerator[Any, None], context: Any) -> AsyncGenerator[Any, None]:
        """End a Watch after its time or when newer calls need its place."""
        with (
            self.entrance.watches.call(context.peer()) as call,
            contextlib.suppress(TimeoutError, StopAsyncIteration),
        ):
            async with contextlib.aclosing(messages):
                while True:
                    yield await call.wait(anext(messages))

    @contextlib.contextmanager
    def _our_status(self, request: UndecodedMessage, context: Any) -> Iterator[None]:
        """Turn exceptions into a status, because gRPC would show their text to clients."""
        began = time.monotonic()
        try:
            yield
        except Exception:
            log.warning("Serve could not call the door", exc_info=True)
            if context.code() in _NO_ERROR:
                context.set_code(grpc.StatusCode.UNKNOWN)
        finally:
            if context.code() not in _NO_ERROR and not is_ours(context.trailing_metadata() or ()):
                code, details = not_ours(context.code())
                context.set_code(code)
                context.set_details(details)
                if not request.was_read:
                    self._audit(Code[code.name], began)

    def _audit(self, code: Code, began: float) -> None:
        if self.rpc:
            Audit(self.rpc).write(code.value, time.monotonic() - began)


def open_door(door: FrontDoor | None) -> None:
    """Set this process's door. Serve adds services to a replica's server once the door exists."""
    Entrance.of_process = door


def add_deltafront_to_server(servicer: Any, server: Any, entrance: Entrance | None = None) -> None:
    """Replace the generated `add_DeltafrontServiceServicer_to_server`. Serve calls this function by name."""
    _add(SERVICE, pb, servicer, server, entrance)


def add_health_to_server(servicer: Any, server: Any, entrance: Entrance | None = None) -> None:
    _add(HEALTH, health_pb2, servicer, server, entrance)


def add_reflection_to_server(_servicer: Any, server: Any) -> None:
    """Add `grpc.reflection.v1`, and its alias v1alpha unless Serve adds that itself."""
    _describe_reflection()
    names = [REFLECTION, reflection.SERVICE_NAME]
    servicer = reflection.aio.ReflectionServicer((SERVICE.full_name, HEALTH.full_name, *names))
    if hasattr(server, "add_passthrough_service"):
        names = [REFLECTION]
        server.add_passthrough_service(REFLECTION)  # the proxy answers without calling a door
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": method}
    for name in names:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def _describe_reflection() -> None:
    """Register the descriptor of v1 reflection, which is v1alpha's with another package name."""
    older = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(older)
    renamed = json_format.MessageToJson(older).replace("v1alpha", "v1")
    newer = json_format.Parse(renamed, descriptor_pb2.FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(newer.SerializeToString())


def _behaviour(service: Any, servicer: Any, method: str, entrance: Entrance) -> Callable[..., Any]:
    if service is HEALTH and entrance.door is not None:
        answer = getattr(entrance.door, method)
        return lambda request, context: answer(request, grpc_context=context)
    behaviour: Callable[..., Any] = getattr(servicer, method)
    return behaviour


def _add(service: Any, messages: Any, servicer: Any, server: Any, entrance: Entrance | None) -> None:
    most = int(os.environ.get(MESSAGE_SIZE_VARIABLE, _DEFAULT_MESSAGE_BYTES))
    entrance = entrance or Entrance(most, Entrance.of_process)
    handlers: dict[str, Any] = {
        method.name: _Handler(
            rpc=method.name if service is SERVICE else "",
            entrance=entrance,
            behaviour=_behaviour(service, servicer, method.name, entrance),
            streaming=method.server_streaming,
            request_deserializer=partial(UndecodedMessage, getattr(messages, method.input_type.name)),
            response_serializer=getattr(messages, method.output_type.name).SerializeToString,
        )
        for method in service.methods
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.add_registered_method_handlers(service.full_name, handlers)
