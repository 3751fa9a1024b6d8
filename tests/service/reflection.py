"""A client of both versions of gRPC's reflection."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection_pb2

from .inprocess import HANG_S


def ask(channel: grpc.Channel, version: str, **request: str) -> Any:
    method = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    (reply,) = method(iter([reflection_pb2.ServerReflectionRequest(**request)]), timeout=HANG_S)
    return reply


def reflected(channel: grpc.Channel, version: str) -> set[str]:
    """Return the services that a server lists, after checking that it describes each of them."""
    listed = ask(channel, version, list_services="").list_services_response.service
    names = {service.name for service in listed}
    for name in names:
        found = ask(channel, version, file_containing_symbol=name)
        assert found.file_descriptor_response.file_descriptor_proto, (name, found)
    return names
