"""Bad requests get the right code, name the wrong field, and reserve nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.client import DeltafrontClient
from deltafront.service.errors import NotFound, Unauthenticated

from .inprocess import House
from .test_requests import nothing_left

INVALID = grpc.StatusCode.INVALID_ARGUMENT
TEXT = pb.Prompt(text="hello")


def generate(prompt: pb.Prompt | None = TEXT, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=prompt, **fields)


def sampled(**options: Any) -> pb.GenerateRequest:
    return generate(sampling=pb.SamplingOptions(**options))


def method(name: str, **options: float) -> pb.GenerateRequest:
    return generate(attention=pb.AttentionMethod(name=name, options=options))


def timed(field: str, **values: int) -> pb.GenerateRequest:
    request = generate()
    for name, value in values.items():
        setattr(getattr(request, field), name, value)
    return request


def packed(data: bytes) -> pb.GenerateRequest:
    return generate(pb.Prompt(token_ids=data))


def chat(*pairs: tuple[str, str]) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role=role, content=content) for role, content in pairs]
    return generate(pb.Prompt(messages=pb.ChatMessages(messages=messages)))


BAD: dict[str, tuple[pb.GenerateRequest, str]] = {
    "nothing": (pb.GenerateRequest(), "source: is missing"),
    "empty prompt": (generate(pb.Prompt()), "prompt: is empty"),
    "empty text": (generate(pb.Prompt(text="")), "prompt.text: is empty"),
    "empty append": (generate(append=pb.Prompt(text="")), "append.text: is empty"),
    "no messages": (chat(), "prompt.messages: is empty"),
    "no role": (chat(("user", "a"), ("", "b")), "prompt.messages[1].role"),
    "no ids": (packed(b""), "prompt.token_ids: is empty"),
    "ragged ids": (packed(b"12345"), "prompt.token_ids: 5 bytes"),
    "id outside": (packed(b"\x01\0\0\0\x02\x01\0\0"), "prompt.token_ids: id 258 at 1"),
    "too long": (generate(pb.Prompt(text="x" * 8192)), "prompt: 8193 tokens"),
    "too long with append": (generate(pb.Prompt(text="x" * 8000), append=pb.Prompt(text="y" * 300)), "8301"),
    "unknown method": (method("magic"), "attention.name: unknown attention method 'magic'"),
    "unknown option": (method("dpxa", wings=2), "attention.options.wings"),
    "option outside": (method("dpxa", tau=2), "attention.options.tau"),
    "option NaN": (method("dpxa", tau=math.nan), "attention.options.tau"),
    "two rules": (method("dpxa", share=0.5, density=0.5), "attention.options: share = 0.5 and density"),
    "whole prompt only": (method("flex"), "attention.name: flex needs the whole prompt"),
    "whole prompt, corrected": (method("vertical_slash+delta"), "attention.name"),
    "negative temperature": (sampled(temperature=-0.1), "sampling.temperature"),
    "NaN temperature": (sampled(temperature=math.nan), "sampling.temperature"),
    "infinite temperature": (sampled(temperature=math.inf), "sampling.temperature"),
    "zero top_p": (sampled(top_p=0.0), "sampling.top_p"),
    "top_p above one": (sampled(top_p=1.1), "sampling.top_p"),
    "NaN top_p": (sampled(top_p=math.nan), "sampling.top_p"),
    "negative top_k": (sampled(top_k=-1), "sampling.top_k"),
    "no tokens": (sampled(max_tokens=0), "sampling.max_tokens"),
    "negative tokens": (sampled(max_tokens=-5), "sampling.max_tokens"),
    "too many tokens": (sampled(max_tokens=8193), "sampling.max_tokens"),
    "too many stops": (sampled(stop=["x"] * 17), "sampling.stop: 17"),
    "empty stop": (sampled(stop=["a", ""]), "sampling.stop[1]"),
    "long stop": (sampled(stop=["é" * 129]), "sampling.stop[0]"),
    "unknown selection": (generate(page_selection=9), "page_selection: 9"),
    "no delta here": (generate(page_selection=pb.PAGE_SELECTION_DELTA), "page_selection: this server"),
    "negative blocks": (
        generate(recompute_blocks=-1),
        "recompute_blocks: -1 must be between 0 (none) and 64",
    ),
    "too many blocks": (generate(recompute_blocks=65), "recompute_blocks: 65 must be"),
    "no ttl": (timed("session_ttl", seconds=0, nanos=0), "session_ttl"),
    "negative ttl": (timed("session_ttl", seconds=-1), "session_ttl"),
    "endless ttl": (timed("session_ttl", seconds=10**9), "session_ttl"),
    "malformed deadline": (timed("deadline", seconds=10**10, nanos=-1), "deadline: nanos"),
    "long id": (generate(request_id="x" * 129), "request_id"),
    "odd id": (generate(request_id="a\nb"), "request_id"),
    "session without append": (pb.GenerateRequest(session_id="d0.x"), "append: is missing"),
    "session with method": (
        pb.GenerateRequest(session_id="d0.x", append=TEXT, attention=pb.AttentionMethod(name="dpxa")),
        "attention: applies to a prompt",
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    from deltafront.service.metrics import Metrics

    from .inprocess import Loop, open_house, settings, write_model

    folder, loop = tmp_path_factory.mktemp("shared"), Loop()
    config = settings(write_model(folder / "model"))
    house, server = loop.run(open_house(config, Metrics(folder / "metrics"), loop))
    yield house
    loop.run(server.stop(0.2))
    loop.run(house.fleet.stop())
    loop.stop()


def refusal(house: House, rpc: str, request: Any) -> Any:
    with grpc.insecure_channel(house.address) as channel:
        kind = channel.unary_unary if rpc in ("ReleaseSession", "GetServerInfo") else channel.unary_stream
        serialize = None if isinstance(request, bytes) else type(request).SerializeToString
        call = kind(f"/deltafront.v1.DeltafrontService/{rpc}", request_serializer=serialize)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(request))
    return caught.value


@pytest.mark.parametrize("name", BAD)
def test_refuses_a_bad_request_before_reserving_anything(name: str, shared: House) -> None:
    request, says = BAD[name]
    error = refusal(shared, "Generate", request)
    assert error.code() is INVALID, error.details()
    assert says in error.details()
    assert "\n" not in error.details()
    assert not shared.group.jobs
    assert not shared.pages_used()


@pytest.mark.parametrize("rpc", ["Generate", "Prefill", "ReleaseSession"])
@pytest.mark.parametrize("data", [b"\x0a\x04\x0a\x02\xff\xfe", b"\xff\xff\xff", b"\x0a\x02\xff\xfe"])
def test_undecodable_message_is_an_invalid_argument(rpc: str, data: bytes, shared: House) -> None:
    error = refusal(shared, rpc, data)
    assert error.code() is INVALID, error.details()
    assert "UTF-8" in error.details()


def test_a_prefill_needs_a_prompt(shared: House) -> None:
    assert "prompt: is missing" in refusal(shared, "Prefill", pb.PrefillRequest()).details()
    assert refusal(shared, "ReleaseSession", pb.ReleaseSessionRequest()).code() is INVALID


def test_a_deadline_in_the_past_is_exceeded(shared: House) -> None:
    error = refusal(shared, "Generate", timed("deadline", seconds=int(time.time()) - 10))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("session", ["nobody", "d0.unknown", "d9.x", "d0.", "\N{SNOWMAN}.x", "a" * 5000])
def test_an_unknown_session_is_not_found(session: str, shared: House) -> None:
    for rpc, request in (
        ("Generate", pb.GenerateRequest(session_id=session, append=TEXT)),
        ("ReleaseSession", pb.ReleaseSessionRequest(session_id=session)),
    ):
        assert refusal(shared, rpc, request).code() is grpc.StatusCode.NOT_FOUND
    assert not shared.pages_used()


def test_an_expired_session_is_not_found(shared: House) -> None:
    with DeltafrontClient(shared.address) as client:
        *_, made = client.prefill("x", session_ttl_s=0.05)
        time.sleep(0.1)
        session = made.session.session_id  # type: ignore[union-attr]
        for call in (
            lambda: list(client.generate(session_id=session, append="y")),
            lambda: client.release(session),
        ):
            with pytest.raises(NotFound):
                call()
    nothing_left(shared)


def test_token_cannot_use_anothers_session(make_house: Callable[..., House], tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("alpha\nbeta\n")
    house = make_house(tokens_file=str(tmp_path / "tokens"))
    with (
        DeltafrontClient(house.address, "alpha") as alpha,
        DeltafrontClient(house.address, "beta") as beta,
        DeltafrontClient(house.address, "gamma") as gamma,
    ):
        *_, made = alpha.prefill("x")
        session = made.session.session_id  # type: ignore[union-attr]
        for call in (
            lambda: beta.release(session),
            lambda: list(beta.generate(session_id=session, append="y")),
        ):
            with pytest.raises(NotFound):
                call()
        for call in (gamma.info, lambda: list(gamma.generate("x")), lambda: list(gamma.prefill("x"))):
            with pytest.raises(Unauthenticated):
                call()
        assert list(alpha.generate(session_id=session, append="y", max_tokens=2))
        alpha.release(session)
    nothing_left(house)
