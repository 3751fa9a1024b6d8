"""How the services are registered with a gRPC server: what Serve would do wrong at either end of a call.

Serve's gRPC servers decode requests before any of our code runs, and answer INTERNAL to what they cannot
decode. So the service and grpc.health.v1 are registered with decoders that hand on an `Unreadable` instead,
which the door answers with INVALID_ARGUMENT.

They also answer in Ray's words where a door cannot be called: it died, or is being stopped. Serve puts its
own functions into a handler with the handler's `_replace`, so that is where these are wrapped: a status that
the door did not give becomes UNAVAILABLE with a plain sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from ...protos.v1 import deltafront_pb2 as pb
from .status import is_ours, not_ours

log = logging.getLogger(__name__)

_FINE = (None, grpc.StatusCode.OK, grpc.StatusCode.OK.value[0])
"""gRPC keeps a code as it was given, as a member or as its number."""
SERVICE = pb.DESCRIPTOR.services_by_name["DeltafrontService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_M = TypeVar("_M", bound=Message)
_Unary = Callable[[Any, Any], Awaitable[Any]]
_Stream = Callable[[Any, Any], AsyncIterator[Any]]


@dataclass(frozen=True)
class Unreadable:
    """A message that is not valid protobuf, or holds text that is not UTF-8."""

    reason: str


@dataclass(frozen=True)
class _Handler:
    """A method as gRPC reads it (its `RpcMethodHandler`), whose functions Serve may replace by its own."""

    request_deserializer: Callable[[bytes], Any]
    response_serializer: Callable[[Any], bytes] | None
    response_streaming: bool
    unary_unary: _Unary | None = None
    unary_stream: _Stream | None = None
    stream_unary: Any = None
    stream_stream: Any = None
    request_streaming: bool = False

    def _replace(self, **changes: Any) -> _Handler:
        wrap: dict[str, Callable[[Any], Any]] = {"unary_unary": _plain_unary, "unary_stream": _plain_stream}
        plain = {name: wrap[name](value) if name in wrap else value for name, value in changes.items()}
        return dataclasses.replace(self, **plain)


def add_deltafront_to_server(servicer: Any, server: Any) -> None:
    """The generated `add_DeltafrontServiceServicer_to_server`, with decoders that never raise.

    Named in Serve's `grpc_servicer_functions`, as is the next one.
    """
    _add(SERVICE, pb, servicer, server)


def add_health_to_server(servicer: Any, server: Any) -> None:
    """The same for grpc.health.v1."""
    _add(HEALTH, health_pb2, servicer, server)


def _add(service: Any, messages: Any, servicer: Any, server: Any) -> None:
    handlers: dict[str, Any] = {
        method.name: _Handler(
            tolerant(getattr(messages, method.input_type.name)),
            getattr(messages, method.output_type.name).SerializeToString,
            method.server_streaming,
            **_behaviour(method.server_streaming, getattr(servicer, method.name)),
        )
        for method in service.methods
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.add_registered_method_handlers(service.full_name, handlers)


def _behaviour(streaming: bool, behaviour: Any) -> dict[str, Any]:
    return {"unary_stream": _filled(behaviour)} if streaming else {"unary_unary": behaviour}


def tolerant(kind: type[_M]) -> Callable[[bytes], _M | Unreadable]:
    def decode(data: bytes) -> _M | Unreadable:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Unreadable(
                f"{kind.DESCRIPTOR.name} cannot be decoded: invalid protobuf, or text that is not UTF-8"
            )

    return decode


def _plain_unary(behaviour: _Unary) -> _Unary:
    async def unary(request: Any, context: Any) -> Any:
        answer: Any = b""
        with _plain_words(context):
            answer = await behaviour(request, context)
        return answer

    return unary


def _plain_stream(behaviour: _Stream) -> _Stream:
    filled = _filled(behaviour)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        with _plain_words(context):
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
def _plain_words(context: Any) -> Iterator[None]:
    """Replace a status of Serve's. Nothing is raised: gRPC would show the exception's text."""
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
