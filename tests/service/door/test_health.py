"""SERVING exactly while every configured role has a started member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deltafront.service.client import DeltafrontClient
from deltafront.service.errors import WorkerFailed

from ..inprocess import House

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
def test_a_role_that_is_only_starting_keeps_the_door_shut(
    make_house: Callable[..., House], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(refresh_s=3600)  # polls when told
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
def test_one_started_member_is_enough(make_house: Callable[..., House], role: str) -> None:
    house = make_house(refresh_s=3600)
    house.add_group("prefill:g1") if role == "group" else house.add_decode("decode:d1")
    house.cut(role).cut = True
    house.loop.run(house.fleet.refresh())
    assert health(house) == SERVING
