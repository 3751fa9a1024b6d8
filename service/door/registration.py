"""How the service is registered with a gRPC server.

Serve's gRPC server decodes requests before any of our code runs, and answers INTERNAL to what it cannot
decode. So the service is registered with decoders that hand on an `Unreadable` instead, which the door
answers with INVALID_ARGUMENT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from ...protos.v1 import deltafront_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["DeltafrontService"]
_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True)
class Unreadable:
    """A message that is not valid protobuf, or holds text that is not UTF-8."""

    reason: str


def add_deltafront_to_server(servicer: Any, server: Any) -> None:
    """The generated `add_DeltafrontServiceServicer_to_server`, with decoders that never raise.

    Named in Serve's `grpc_servicer_functions`.
    """
    kinds: Mapping[bool, Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
        True: grpc.unary_stream_rpc_method_handler,
        False: grpc.unary_unary_rpc_method_handler,
    }
    handlers = {
        method.name: kinds[method.server_streaming](
            getattr(servicer, method.name),
            request_deserializer=tolerant(getattr(pb, method.input_type.name)),
            response_serializer=getattr(pb, method.output_type.name).SerializeToString,
        )
        for method in SERVICE.methods
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
    server.add_registered_method_handlers(SERVICE.full_name, handlers)


def tolerant(kind: type[_M]) -> Callable[[bytes], _M | Unreadable]:
    def decode(data: bytes) -> _M | Unreadable:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Unreadable(
                f"{kind.DESCRIPTOR.name} cannot be decoded: invalid protobuf, or text that is not UTF-8"
            )

    return decode
