"""How the services are registered with a gRPC server: what Serve would do wrong at either end of a call.

Serve's gRPC servers decode requests before any of our code runs, and answer INTERNAL to what they cannot
decode. So the service and grpc.health.v1 are registered with a decoder that hands on what was `Sent`. The
door decodes it once it knows the caller and has room for it, and answers INVALID_ARGUMENT if it cannot.

gRPC reads a request into memory before it calls a method, and keeps it until the call has ended. A method
that takes a stream of requests asks for each instead. So every method is registered as one, and takes the
first. No more are read at once than have room, and a client has bounded time to send.

A request that ends before a door has it leaves its line in the audit log here.

They also answer in Ray's words where a door cannot be called: it died, or is being stopped. Serve puts its
own functions into a handler with the handler's `_replace`, so that is where these are wrapped: a status that
the door did not give becomes UNAVAILABLE with a plain sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from ...protos.v1 import deltafront_pb2 as pb
from ..errors import Code, DeltafrontError, InvalidArgument, Overloaded, TooSlow
from ..request.audit import Audit
from ..request.callers import RETRY_S
from .fields import has_more_fields, text_of
from .status import details, is_ours, not_ours, status, trailers

log = logging.getLogger(__name__)

_FINE = (None, grpc.StatusCode.OK, grpc.StatusCode.OK.value[0])
"""gRPC keeps a code as it was given, as a member or as its number."""
SERVICE = pb.DESCRIPTOR.services_by_name["DeltafrontService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
MESSAGE_SIZE_VARIABLE = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
"""How long a message may be, to Serve's servers."""
_RECEIVING_BYTES = 256 << 20
"""Bytes of all messages that are being received, if each were as long as it may be."""
_WAIT_S = 10.0
"""How long a call waits until others have been received."""
_RECEIVE_S = 60.0
"""How long a client may take to send a message."""
_ENDED_S = 0.1
"""In which gRPC cancels a call that it has ended: requests seem to be over first."""
_MAX_FIELDS = 1 << 16
_DEFAULT_MESSAGE_BYTES = 16 << 20
_M = TypeVar("_M", bound=Message)
_Unary = Callable[[Any, Any], Awaitable[Any]]
_Stream = Callable[[Any, Any], AsyncIterator[Any]]


@dataclass
class Sent(Generic[_M]):
    """A message as it came. It can be read once, and then takes no memory here."""

    kind: type[_M]
    data: bytes = dataclasses.field(repr=False)
    was_read: bool = False

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def request_id(self) -> str:
        """Before it is read; empty where the message has none."""
        field = self.kind.DESCRIPTOR.fields_by_name.get("request_id")
        return "" if field is None else text_of(self.data, field.number)

    def read(self) -> _M:
        """Raises InvalidArgument for what is not valid protobuf, or holds text that is not UTF-8."""
        data, self.data, self.was_read = self.data, b"", True
        name = self.kind.DESCRIPTOR.name
        try:
            if has_more_fields(data, self.kind.DESCRIPTOR, _MAX_FIELDS):
                raise InvalidArgument("request", f"{name} has more than {_MAX_FIELDS} fields")
            return self.kind.FromString(data)
        except (DecodeError, ValueError):
            reason = f"{name} cannot be decoded: invalid protobuf, or text that is not UTF-8"
            raise InvalidArgument("request", reason) from None


class Receiving:
    """max_message_bytes: of each that is received."""

    def __init__(self, max_message_bytes: int) -> None:
        self._places = asyncio.Semaphore(max(_RECEIVING_BYTES // max_message_bytes, 4))

    async def first(self, requests: AsyncIterator[Any]) -> Any:
        """A call's request. Raises DeltafrontError."""
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._places.acquire()
        except TimeoutError:
            message = "this server receives as many requests as it can hold: try again"
            raise Overloaded(message, retry_after_s=RETRY_S) from None
        try:
            async with asyncio.timeout(_RECEIVE_S):
                async for request in requests:
                    return request
        except TimeoutError:
            raise TooSlow(f"the request did not arrive within {_RECEIVE_S:.0f} s") from None
        finally:
            self._places.release()
        await asyncio.sleep(_ENDED_S)
        raise InvalidArgument("request", "is missing")


@dataclass(frozen=True)
class _Arrival:
    """Takes a method's requests, and notes those that no door gets. rpc: empty for health checks, which have
    no lines."""

    rpc: str
    receiving: Receiving

    async def request(self, requests: AsyncIterator[Any], context: Any) -> Any:
        """A call's request, or None if it was refused."""
        began = time.monotonic()
        try:
            return await self.receiving.first(requests)
        except DeltafrontError as error:
            _refuse(context, error)
            self.note(error.code, began)
        except asyncio.CancelledError:  # it left, or its message is longer than gRPC takes
            self.note(Code.CANCELLED, began)
            raise

    def note(self, code: Code, began: float) -> None:
        if self.rpc:
            Audit(self.rpc).write(code.value, time.monotonic() - began)


@dataclass(frozen=True)
class _Handler:
    """A method as gRPC reads it (its `RpcMethodHandler`), whose functions Serve may replace by its own."""

    request_deserializer: Callable[[bytes], Any]
    response_serializer: Callable[[Any], bytes] | None
    response_streaming: bool
    arrival: _Arrival
    stream_unary: _Unary | None = None
    stream_stream: _Stream | None = None
    unary_unary: Any = None
    unary_stream: Any = None
    request_streaming: bool = True

    def _replace(self, **changes: Any) -> _Handler:
        """Call with the first request of a stream what Serve would call with one request."""
        unary, stream = changes.pop("unary_unary", None), changes.pop("unary_stream", None)
        changes["stream_unary"] = unary and _received_unary(_plain_unary(unary, self.arrival), self.arrival)
        changes["stream_stream"] = stream and _received_stream(
            _plain_stream(stream, self.arrival), self.arrival
        )
        return dataclasses.replace(self, **changes)


def add_deltafront_to_server(servicer: Any, server: Any, receiving: Receiving | None = None) -> None:
    """The generated `add_DeltafrontServiceServicer_to_server`, for methods that decode by themselves.

    Named in Serve's `grpc_servicer_functions`, as is the next one. receiving: None for a server of Serve's.
    """
    _add(SERVICE, pb, servicer, server, receiving)


def add_health_to_server(servicer: Any, server: Any, receiving: Receiving | None = None) -> None:
    """The same for grpc.health.v1."""
    _add(HEALTH, health_pb2, servicer, server, receiving)


def _add(service: Any, messages: Any, servicer: Any, server: Any, receiving: Receiving | None) -> None:
    receiving = receiving or Receiving(int(os.environ.get(MESSAGE_SIZE_VARIABLE, _DEFAULT_MESSAGE_BYTES)))
    handlers: dict[str, Any] = {}
    for method in service.methods:
        arrival = _Arrival(method.name if service is SERVICE else "", receiving)
        handlers[method.name] = _Handler(
            _unread(getattr(messages, method.input_type.name)),
            getattr(messages, method.output_type.name).SerializeToString,
            method.server_streaming,
            arrival,
            **_behaviour(method.server_streaming, getattr(servicer, method.name), arrival),
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.add_registered_method_handlers(service.full_name, handlers)


def _behaviour(streaming: bool, behaviour: Any, arrival: _Arrival) -> dict[str, Any]:
    if streaming:
        return {"stream_stream": _received_stream(_filled(behaviour), arrival)}
    return {"stream_unary": _received_unary(behaviour, arrival)}


def _unread(kind: type[_M]) -> Callable[[bytes], Sent[_M]]:
    def sent(data: bytes) -> Sent[_M]:
        return Sent(kind, data)

    return sent


def _received_unary(behaviour: _Unary, arrival: _Arrival) -> _Unary:
    async def unary(requests: AsyncIterator[Any], context: Any) -> Any:
        request = await arrival.request(requests, context)
        return b"" if request is None else await behaviour(request, context)

    return unary


def _received_stream(behaviour: _Stream, arrival: _Arrival) -> _Stream:
    async def stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        request = await arrival.request(requests, context)
        if request is None:
            return
        async with contextlib.aclosing(behaviour(request, context)) as messages:  # type: ignore[type-var]
            del request
            async for message in messages:
                yield message

    return stream


def _refuse(context: Any, error: DeltafrontError) -> None:
    log.warning("a request was not received: %s", error.message)
    context.set_code(status(error))
    context.set_details(details(error))
    context.set_trailing_metadata(trailers(error))


def _plain_unary(behaviour: _Unary, arrival: _Arrival) -> _Unary:
    async def unary(request: Any, context: Any) -> Any:
        answer: Any = b""
        with _plain_words(request, context, arrival):
            answer = await behaviour(request, context)
        return answer

    return unary


def _plain_stream(behaviour: _Stream, arrival: _Arrival) -> _Stream:
    filled = _filled(behaviour)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        with _plain_words(request, context, arrival):
            async for message in filled(request, context):
                yield message

    return stream


def _filled(behaviour: _Stream) -> _Stream:
    """Without empty messages, which take a status along inside Serve. A message: bytes already, if Serve
    calls the door."""

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        async for message in behaviour(request, context):
            if message if isinstance(message, bytes) else message.ByteSize():
                yield message

    return stream


@contextlib.contextmanager
def _plain_words(request: Any, context: Any, arrival: _Arrival) -> Iterator[None]:
    """Replace a status of Serve's. Nothing is raised: gRPC would show the exception's text."""
    began = time.monotonic()
    try:
        yield
    except Exception:
        log.warning("Serve could not call the door", exc_info=True)
        if context.code() in _FINE:
            context.set_code(grpc.StatusCode.UNKNOWN)
    finally:
        if context.code() not in _FINE and not is_ours(context.trailing_metadata() or ()):
            code, details = not_ours(context.code())
            context.set_code(code)
            context.set_details(details)
            if not request.was_read:
                arrival.note(Code[code.name], began)
