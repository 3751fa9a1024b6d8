"""Health is SERVING exactly while each role has a started worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray.serve._private.grpc_util import gRPCGenericServer

from deltafront.service.client import DeltafrontClient
from deltafront.service.door.registration import Entrance, add_health_to_server
from deltafront.service.door.status import is_ours
from deltafront.service.errors import WorkerFailed
from deltafront.service.request.places import NewestOnly

from ..inprocess import HANG_S, House, wait_until
from .test_bounds import silent
from .test_registration import Nobody, raises, serve_that

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


def health(house: House) -> Any:
    with grpc.insecure_channel(house.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        one = stub.Check(health_pb2.HealthCheckRequest()).status
        (every,) = {answer.status for answer in stub.List(health_pb2.HealthListRequest()).statuses.values()}
        assert next(stub.Watch(health_pb2.HealthCheckRequest())).status == one == every
    return one


@pytest.mark.parametrize("role", ["group", "decode"])
def test_health_is_not_serving_while_a_role_only_starts(
    make_house: Callable[..., House], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(refresh_s=3600)  # polls only on request
    assert health(house) == SERVING
    worker = house.group if role == "group" else house.decode

    async def starting() -> None:
        raise WorkerFailed(worker.name, "it is loading its model")

    with monkeypatch.context() as patch:
        patch.setattr(worker, "stats", starting)
        house.loop.run(house.fleet.refresh())
        assert health(house) == NOT_SERVING
        with DeltafrontClient(house.address) as client:
            info = client.info()
        assert (info.prefill_groups, info.decode_workers) == ((0, 1) if role == "group" else (1, 0))
    house.loop.run(house.fleet.refresh())
    assert health(house) == SERVING


@pytest.mark.parametrize("role", ["group", "decode"])
def test_health_is_serving_with_one_started_worker_per_role(
    make_house: Callable[..., House], role: str
) -> None:
    house = make_house(refresh_s=3600)
    house.add_group("prefill:g1") if role == "group" else house.add_decode("decode:d1")
    house.cut(role).cut = True
    house.loop.run(house.fleet.refresh())
    assert health(house) == SERVING


def watch(channel: grpc.Channel) -> Any:
    stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
    return stub.Watch(health_pb2.HealthCheckRequest(), timeout=HANG_S)


@pytest.mark.parametrize("call", ["Check", "Watch", "List"])
def test_health_answers_while_all_message_places_are_taken(house: House, call: str) -> None:
    with silent(house, 50, path=f"/grpc.health.v1.Health/{call}"), silent(house, 20):
        wait_until(lambda: len(house.entrance.messages._held) == 16, "the messages are not waited for")
        assert health(house) == SERVING


@pytest.mark.parametrize("bound", ["in all", "of a connection"])
def test_bounds_health_watches_and_keeps_the_newest(house: House, bound: str) -> None:
    places = NewestOnly(3, HANG_S) if bound == "in all" else NewestOnly(100, HANG_S, per_connection=3)
    house.entrance.watches = places
    with grpc.insecure_channel(house.address) as channel:
        watches = []
        for _ in range(5):
            watches.append(watch(channel))
            assert next(watches[-1]).status == SERVING
        assert [list(one) for one in watches[:2]] == [[], []]
        assert not any(one.done() for one in watches[2:])


def test_health_watch_ends_at_its_time_limit(house: House) -> None:
    house.entrance.watches = NewestOnly(100, 0.1)
    with grpc.insecure_channel(house.address) as channel:
        assert [answer.status for answer in watch(channel)] == [SERVING]


def test_health_bypasses_serves_request_queue(house: House) -> None:

    async def asked() -> Any:
        server = gRPCGenericServer(serve_that(raises))
        add_health_to_server(Nobody(), server, Entrance(1 << 20, house.door))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
            one = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)
            watched = await anext(aiter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=HANG_S)))
        await server.stop(None)
        return one.status, watched.status

    assert asyncio.run(asked()) == (SERVING, SERVING)


@pytest.mark.parametrize("call", ["Check", "Watch", "List"])
def test_refuses_an_undecodable_health_request(house: House, call: str) -> None:
    with grpc.insecure_channel(house.address) as channel:
        kind = channel.unary_stream if call == "Watch" else channel.unary_unary
        answer: Any = kind(f"/grpc.health.v1.Health/{call}")
        with pytest.raises(grpc.RpcError) as caught:
            list(answer(b"\xff", timeout=HANG_S)) if call == "Watch" else answer(b"\xff", timeout=HANG_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be decoded" in caught.value.details()


def test_health_of_an_unknown_service_is_not_found(house: House) -> None:
    with grpc.insecure_channel(house.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        asked = health_pb2.HealthCheckRequest(service="nobody")
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(asked, timeout=HANG_S)
        assert (
            next(stub.Watch(asked, timeout=HANG_S)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        )
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "there is no service 'nobody' here"
    assert is_ours(caught.value.trailing_metadata())
