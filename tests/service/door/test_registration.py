"""If Serve's gRPC server cannot call a door, clients get a plain message and a code for retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray.serve._private.grpc_util import gRPCGenericServer

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc
from deltafront.service.door.registration import (
    UndecodedMessage,
    add_deltafront_to_server,
    add_health_to_server,
)
from deltafront.service.door.status import OWN_STATUS

from ..inprocess import HANG_S, House

GONE = "The actor died unexpectedly before finishing this task. class_name: ServeReplica"


class Nobody:
    """A servicer like that in Serve's proxy, whose methods are never called."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def serve_that(end: Callable[[Any], None]) -> Callable[..., Any]:
    """Return Serve's functions for a call. A streaming call yields one message, calls `end` and yields an
    empty message."""

    def factory(service_method: str, streaming_type: Any) -> Callable[..., Any]:
        async def unary(_request: Any, context: Any) -> bytes:
            end(context)
            return b""

        async def stream(_request: Any, context: Any) -> AsyncIterator[bytes]:
            yield pb.GenerateResponse(token=pb.Token(index=0)).SerializeToString()
            end(context)
            yield b""  # the door's last message, which only Serve's proxy uses

        return stream if "STREAM" in streaming_type.name.split("_")[1] else unary

    return factory


def ends_with(code: grpc.StatusCode, metadata: tuple[tuple[str, str], ...] = ()) -> Callable[[Any], None]:
    def end(context: Any) -> None:
        context.set_code(code)
        context.set_details(GONE)
        context.set_trailing_metadata(metadata)

    return end


def raises(context: Any) -> None:
    context.set_code(grpc.StatusCode.INTERNAL)
    context.set_details(GONE)
    raise RuntimeError(GONE)


async def _ask(stub: Any) -> None:
    await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=HANG_S)


async def _read(stub: Any) -> None:
    async for _message in stub.Generate(pb.GenerateRequest(), timeout=HANG_S):
        pass


async def _check(stub: Any) -> None:
    await stub.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)


async def _watch(stub: Any) -> None:
    async for _message in stub.Watch(health_pb2.HealthCheckRequest(), timeout=HANG_S):
        pass


async def statuses(end: Callable[[Any], None]) -> list[tuple[grpc.StatusCode, str]]:
    """Return the statuses of a unary call and of a stream, for the service and for grpc.health.v1."""
    server = gRPCGenericServer(serve_that(end))
    add_deltafront_to_server(Nobody(), server)
    add_health_to_server(Nobody(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    found = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = pb_grpc.DeltafrontServiceStub(channel)  # type: ignore[no-untyped-call]
        health: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        for work in (_ask(stub), _read(stub), _check(health), _watch(health)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await work
            found.append((caught.value.code(), caught.value.details() or ""))
    await server.stop(None)
    return found


def test_rays_errors_reach_clients_as_unavailable() -> None:
    for end in (raises, *(ends_with(grpc.StatusCode[name]) for name in ("INTERNAL", "UNKNOWN", "NOT_FOUND"))):
        for code, details in asyncio.run(statuses(end)):
            assert code is grpc.StatusCode.UNAVAILABLE
            assert details == "the server that had the request is gone: send it again"


def test_too_many_requests_is_resource_exhausted() -> None:
    for code, details in asyncio.run(statuses(ends_with(grpc.StatusCode.RESOURCE_EXHAUSTED))):
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "as many requests as it may" in details


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.NOT_FOUND])
def test_status_that_the_door_sets_reaches_the_client(code: grpc.StatusCode) -> None:
    found = asyncio.run(statuses(ends_with(code, ((OWN_STATUS, "x"),))))
    assert found == [(code, GONE)] * 4


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, None])
def test_grpc_status_of_successful_calls_is_unchanged(code: grpc.StatusCode | None) -> None:
    """Covers calls whose status is unset and calls where Serve sets OK."""

    def end(context: Any) -> None:
        if code is not None:
            context.set_code(code)

    async def both() -> tuple[Any, list[Any]]:
        server = gRPCGenericServer(serve_that(end))
        add_deltafront_to_server(Nobody(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = pb_grpc.DeltafrontServiceStub(channel)  # type: ignore[no-untyped-call]
            answer = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=HANG_S)
            events = [event async for event in stub.Generate(pb.GenerateRequest(), timeout=HANG_S)]
        await server.stop(None)
        return answer, events

    answer, events = asyncio.run(both())
    assert answer == pb.GetServerInfoResponse()
    assert len(events) == 1


class Noted:
    """A context like a door's in Serve: Serve's proxy reads it only when a message arrives."""

    code: grpc.StatusCode | None = None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...


@pytest.mark.parametrize("call", ["Prefill", "Generate"])
def test_refused_stream_carries_its_status_with_a_message(house: House, call: str) -> None:
    async def heard(request: Any) -> list[tuple[int, grpc.StatusCode | None]]:
        context = Noted()
        stream = getattr(house.door, call)(
            UndecodedMessage(type(request), request.SerializeToString()), context
        )
        return [(message.ByteSize(), context.code) async for message in stream]

    kind = getattr(pb, f"{call}Request")
    assert house.loop.run(heard(kind())) == [(0, grpc.StatusCode.INVALID_ARGUMENT)]
    *events, last = house.loop.run(heard(kind(prompt=pb.Prompt(text="Call me Ishmael."))))
    assert last == (0, None)
    assert events and all(size and code is None for size, code in events)
