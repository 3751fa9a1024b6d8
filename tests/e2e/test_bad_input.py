"""Each bad input has its status code, says what is wrong, leaves nothing behind."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import grpc
import pytest

from deltafront.protos.v1 import deltafront_pb2 as pb

from .conftest import Sizes
from .wire import PATIENCE_S, Wire, method, packed, text

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(autouse=True)
def nothing_is_left(wire: Wire) -> Iterator[None]:
    yield
    wire.seconds_to_no_page()
    assert wire.info().vocabulary == 49_152


def sampled(**options: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=text("Call me"), sampling=pb.SamplingOptions(**options))  # type: ignore[arg-type]


def past() -> pb.GenerateRequest:
    request = pb.GenerateRequest(prompt=text("Call me"))
    request.deadline.FromSeconds(1_000_000_000)
    return request


BAD = {
    "nothing": (pb.GenerateRequest(), INVALID, "prompt"),
    "empty text": (pb.GenerateRequest(prompt=text("")), INVALID, "prompt"),
    "no ids": (pb.GenerateRequest(prompt=pb.Prompt(token_ids=b"")), INVALID, "token_ids"),
    "no messages": (pb.GenerateRequest(prompt=pb.Prompt(messages=pb.ChatMessages())), INVALID, "messages"),
    "too long": (pb.GenerateRequest(prompt=pb.Prompt(token_ids=packed([5] * 131_073))), INVALID, "131072"),
    "ragged ids": (pb.GenerateRequest(prompt=pb.Prompt(token_ids=b"abcde")), INVALID, "token_ids"),
    "foreign id": (pb.GenerateRequest(prompt=pb.Prompt(token_ids=packed([49_152]))), INVALID, "49152"),
    "unknown method": (pb.GenerateRequest(prompt=text("a"), attention=method("flash")), INVALID, "flash"),
    "unknown option": (
        pb.GenerateRequest(prompt=text("a"), attention=method("dpxa", tow=1)),
        INVALID,
        "tow",
    ),
    "option NaN": (
        pb.GenerateRequest(prompt=text("a"), attention=method("dpxa", tau=math.nan)),
        INVALID,
        "tau",
    ),
    "whole prompt method": (pb.GenerateRequest(prompt=text("a"), attention=method("flex")), INVALID, "flex"),
    "negative temperature": (sampled(temperature=-1), INVALID, "temperature"),
    "NaN temperature": (sampled(temperature=math.nan), INVALID, "temperature"),
    "infinite temperature": (sampled(temperature=math.inf), INVALID, "temperature"),
    "NaN top_p": (sampled(top_p=math.nan), INVALID, "top_p"),
    "zero top_p": (sampled(top_p=0.0), INVALID, "top_p"),
    "negative top_k": (sampled(top_k=-1), INVALID, "top_k"),
    "negative max_tokens": (sampled(max_tokens=-3), INVALID, "max_tokens"),
    "too many tokens": (sampled(max_tokens=200_000), INVALID, "max_tokens"),
    "an answer that no worker can hold": (
        sampled(max_tokens=100_000),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "cache_tokens",
    ),
    "empty stop": (sampled(stop=[""]), INVALID, "stop"),
    "unknown session": (
        pb.GenerateRequest(session_id="nobody.here", append=text("a")),
        grpc.StatusCode.NOT_FOUND,
        "session",
    ),
    "session without question": (pb.GenerateRequest(session_id="nobody.here"), INVALID, "append"),
    "deadline in the past": (past(), grpc.StatusCode.DEADLINE_EXCEEDED, "deadline"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_generate(name: str, wire: Wire) -> None:
    request, code, says = BAD[name]
    with pytest.raises(grpc.RpcError) as caught:
        wire.generate(request)
    assert caught.value.code() == code, caught.value.details()
    assert says in caught.value.details()
    assert "Traceback" not in caught.value.details()
    assert "\n" not in caught.value.details()


def test_an_expired_session_is_not_found(wire: Wire) -> None:
    request = pb.PrefillRequest(prompt=text("Call me Ishmael. " * 20))
    request.session_ttl.FromMilliseconds(300)
    session = wire.prefill(request).session.session_id
    asked = pb.GenerateRequest(
        session_id=session, append=text("a"), sampling=pb.SamplingOptions(max_tokens=1)
    )
    waited = 0.5
    with pytest.raises(grpc.RpcError) as caught:
        while waited < PATIENCE_S:  # longer each time: a question may begin its time anew
            time.sleep(waited)
            waited *= 2
            wire.generate(asked)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_released_session_is_not_found(wire: Wire) -> None:
    session = wire.prefill(pb.PrefillRequest(prompt=text("Call me Ishmael. " * 20))).session.session_id
    assert wire.pages_used() > 0
    wire.stub.ReleaseSession(pb.ReleaseSessionRequest(session_id=session))
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as caught:
            wire.stub.ReleaseSession(pb.ReleaseSessionRequest(session_id=session))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_600_mb_message_is_refused(wire: Wire, sizes: Sizes) -> None:
    if not sizes.timed:
        pytest.skip("make test sends one in tests/service/test_served.py, through the same proxy and door")
    request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=b"\0" * 600_000_000))
    with pytest.raises(grpc.RpcError) as caught:
        wire.generate(request)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_invalid_utf8_is_refused(wire: Wire) -> None:
    """A hand-made message: prompt { text: "\\xff\\xfe" }, which protobuf itself cannot make."""
    call = wire.channel.unary_stream(
        "/deltafront.v1.DeltafrontService/Generate",
        request_serializer=lambda raw: raw,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(call(b"\x0a\x04\x0a\x02\xff\xfe", timeout=PATIENCE_S))
    assert caught.value.code() == INVALID
    assert "Traceback" not in (caught.value.details() or "")


def test_half_a_million_ids_pass_the_wire(wire: Wire) -> None:
    """2 MB arrive whole and are judged by the model's length, not by a message limit."""
    with pytest.raises(grpc.RpcError) as caught:
        wire.generate(pb.GenerateRequest(prompt=pb.Prompt(token_ids=packed([7] * 524_288))))
    assert caught.value.code() == INVALID
    assert "524288" in caught.value.details()
