"""Requests that end before a door has read them have an audit line, too."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray.serve._private.grpc_util import gRPCGenericServer

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc
from deltafront.service.door.edges import call
from deltafront.service.door.registration import add_deltafront_to_server
from deltafront.service.request import places

from ..inprocess import HANG_S, House, wait_until
from .openai_calls import MODEL
from .test_bounds import PATH, ask, silent, status
from .test_registration import Nobody, ends_with, serve_that

GENERATE = "/deltafront.v1.DeltafrontService/Generate"
Lines = Callable[[], list[tuple[str, str, str]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """Return a function that reads rpc, outcome and caller from the audit lines."""
    caplog.set_level(logging.INFO, "deltafront.audit")

    def written() -> list[tuple[str, str, str]]:
        every = [json.loads(one.message) for one in caplog.records if one.name == "deltafront.audit"]
        assert all(one["seconds"] >= 0 for one in every)
        return [(one["rpc"], one["finish"], one["token"]) for one in every]

    yield written


def ids(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = (one for one in caplog.records if one.name == "deltafront.audit")
    return [json.loads(one.message)["request_id"] for one in records]


def test_message_that_does_not_arrive_has_an_audit_line(
    house: House, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_RECEIVE_TIMEOUT_S", 0.1)
    with silent(house, 1) as (call,):
        code, details, ours = status(call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "did not arrive within" in details and ours
    assert lines() == [("Generate", "deadline_exceeded", "")]


def test_message_without_room_has_an_audit_line(
    make_house: Callable[..., House], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_ROOM_TIMEOUT_S", 0.2)
    monkeypatch.setattr(places, "_RECEIVING_BYTES", 0)
    house = make_house()
    with silent(house, 5):
        wait_until(lambda: ("Generate", "resource_exhausted", "") in lines(), "there is no line")
    wait_until(lambda: len(lines()) == 5, "those that left have none")
    assert set(lines()) == {("Generate", "resource_exhausted", ""), ("Generate", "cancelled", "")}


def test_message_too_long_for_grpc_has_an_audit_line(house: House, lines: Lines) -> None:
    """gRPC ends the call by itself, and tells the door only that it has ended."""
    too_long = bytes(house.config.door.max_message_bytes + 1)
    with grpc.insecure_channel(house.address) as channel:
        method = channel.unary_stream(GENERATE)
        assert status(method(too_long, timeout=HANG_S))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    wait_until(lines, "there is no line")
    assert lines() == [("Generate", "cancelled", "")]


def test_call_without_a_message_has_an_audit_line(house: House, lines: Lines) -> None:
    with grpc.insecure_channel(house.address) as channel:
        code, details, _ = status(channel.stream_stream(GENERATE)(iter(()), timeout=HANG_S))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "request: is missing")
    assert lines() == [("Generate", "invalid_argument", "")]


def test_undecodable_message_has_an_audit_line_with_its_request_id(
    house: House, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    sent = pb.GenerateRequest(request_id="mine").SerializeToString() + b"\xff\xff"
    with grpc.insecure_channel(house.address) as channel:
        code, _details, _ours = status(channel.unary_stream(GENERATE)(sent, timeout=HANG_S))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert [(rpc, finish) for rpc, finish, _ in lines()] == [("Generate", "invalid_argument")]
    assert ids(caplog) == ["mine"]


def test_answered_request_has_exactly_one_audit_line(house: House, lines: Lines) -> None:
    assert ask(house)
    assert [(rpc, finish) for rpc, finish, _ in lines()] == [("Generate", "length")]


def test_health_checks_have_no_audit_line(house: House, lines: Lines) -> None:
    with grpc.insecure_channel(house.address) as channel:
        status(channel.stream_stream("/grpc.health.v1.Health/Watch")(iter(()), timeout=HANG_S))
    assert not lines()


def test_call_that_serve_refuses_has_an_audit_line(lines: Lines) -> None:
    """Serve refuses it before it calls the door, for example because the client names another application."""

    async def refused() -> None:
        server = gRPCGenericServer(serve_that(ends_with(grpc.StatusCode.NOT_FOUND)))
        add_deltafront_to_server(Nobody(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = pb_grpc.DeltafrontServiceStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.ReleaseSession(pb.ReleaseSessionRequest(), timeout=HANG_S)
        await server.stop(None)

    asyncio.run(refused())
    assert lines() == [("ReleaseSession", "unavailable", "")]


# --- HTTP --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def announced(address: str, **headers: str) -> Iterator[http.client.HTTPConnection]:
    """Send a request without any byte of its body."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=HANG_S)
    connection.putrequest("POST", PATH)
    connection.putheader("Content-Type", "application/json")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    yield connection
    connection.close()


@pytest.mark.parametrize(
    ("headers", "code", "finish"),
    [
        ({"Content_Length": "1000"}, 401, "unauthenticated"),
        ({"Content_Length": "1000", "Authorization": "Bearer beta"}, 401, "unauthenticated"),
        ({"Content_Length": f"{(1 << 20) + 1}", "Authorization": "Bearer alpha"}, 413, "resource_exhausted"),
        ({"Content_Length": "1000", "Authorization": "Bearer alpha"}, 408, "deadline_exceeded"),
    ],
)
def test_unread_body_has_an_audit_line_with_the_id_of_its_answer(
    make_house: Callable[..., House],
    make_http: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lines: Lines,
    headers: dict[str, str],
    code: int,
    finish: str,
) -> None:
    monkeypatch.setattr(call, "_RECEIVE_S", 0.1)
    (tmp_path / "tokens").write_text("alpha\n")
    house = make_house(model_name=MODEL, tokens_file=str(tmp_path / "tokens"))
    with announced(make_http(house), **headers) as connection:
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)["error"]["type"]) == (code, "invalid_request_error")
    assert [(rpc, ended) for rpc, ended, _ in lines()] == [("Generate", finish)]
    assert ids(caplog) == [answer.headers["x-request-id"]] != [""]
    wait_until(lambda: not house.door._requests.text_budget._held, "its room is kept")


def test_client_that_leaves_while_sending_has_an_audit_line(
    house: House, make_http: Any, lines: Lines
) -> None:
    with announced(make_http(house), Content_Length="1000"):
        pass
    wait_until(lines, "there is no line")
    assert [(rpc, finish) for rpc, finish, _ in lines()] == [("Generate", "cancelled")]
