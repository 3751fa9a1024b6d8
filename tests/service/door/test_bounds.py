"""Doors refuse requests before they read them: without a token, too long, too slow, too many."""

from __future__ import annotations

import contextlib
import difflib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.client import DeltafrontClient
from deltafront.service.door import grpc_door, json_body
from deltafront.service.door.edges import call
from deltafront.service.door.openai import requests as openai_requests
from deltafront.service.door.openai import tools
from deltafront.service.door.status import OWN_STATUS
from deltafront.service.request import places
from deltafront.service.request.calls import MAX_MESSAGES

from ..inprocess import HANG_S, House, wait_until
from .openai_calls import JSON, MODEL

PATH = "/v1/chat/completions"


def post(address: str, content: bytes) -> httpx.Response:
    return httpx.post(address + PATH, content=content, headers=JSON, timeout=HANG_S)


def chat(messages: list[Any]) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode()


def said_to_headers(address: str, *headers: str) -> bytes:
    """Return the first line of the answer to a request whose body is never sent."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), HANG_S) as connection:
        head = [f"POST {PATH} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers, "", ""]
        connection.sendall("\r\n".join(head).encode())
        return connection.recv(1000).split(b"\r\n")[0]


def test_full_door_refuses_before_reading_the_body(house: House, make_http: Any) -> None:
    texts = house.door._requests.text_budget
    with texts.hold("somebody", texts._max_bytes):
        assert b" 429 " in said_to_headers(make_http(house), "Content-Length: 1000")
        refused = post(make_http(house), chat([{"role": "user", "content": "hi"}]))
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"


def test_refuses_too_many_json_values_before_parsing_them(house: House, make_http: Any) -> None:
    address, one = make_http(house), {"role": "user", "content": "a"}
    refused = post(address, chat([[]] * 100_000))
    assert refused.status_code == 400 and "too many values" in refused.json()["error"]["message"]
    refused = post(address, chat([one] * (MAX_MESSAGES + 1)))
    assert refused.json()["error"]["message"].startswith(f"messages: {MAX_MESSAGES + 1} are too many")
    parts = [{"type": "text", "text": "a"}] * 4097
    refused = post(address, chat([{"role": "user", "content": parts}]))
    assert refused.json()["error"]["message"] == "messages[0].content: has 4097 parts: at most 4096"


def test_refuses_too_many_values_in_the_arguments_of_all_calls(
    house: House, make_http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "MAX_VALUES", 100)
    arguments = json.dumps({"a": [[]] * 30, "b": ",[" * 500})
    said = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    refused = post(make_http(house), chat([{"role": "assistant", "tool_calls": [said, said]}]))
    error = refused.json()["error"]
    assert error["param"] == "messages[0].tool_calls[1].function.arguments" and "values" in error["message"]


def test_brackets_inside_strings_do_not_count_as_json_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "MAX_VALUES", 20)
    for content in ('{"a": [1, 2, 3], "b": {}}' * 100, '\\",[' * 100, "\\" * 101, "é{\n" * 50):
        request, _ = openai_requests.read_chat(chat([{"role": "user", "content": content}]), MODEL)
        assert request.prompt is not None and request.prompt.messages is not None
        assert request.prompt.messages[0]["content"] == content


def test_body_may_hold_a_million_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = list(range(1 << 20))
    body = json.dumps({"model": MODEL, "prompt": ids}).encode()
    request, _ = openai_requests.read_text(body, MODEL)
    assert request.prompt is not None and len(request.prompt.token_ids or b"") == 4 * len(ids)


@pytest.mark.parametrize(
    ("given", "tokens"), [({}, 1), ({"special_tokens": "text"}, 5), ({"special_tokens": "no"}, 0)]
)
def test_completions_parse_control_tokens_unless_told_not_to(
    house: House, make_http: Any, given: dict[str, str], tokens: int
) -> None:
    body = {"model": MODEL, "prompt": "<eos>", "max_tokens": 1, **given}
    answer = httpx.post(f"{make_http(house)}/v1/completions", json=body, timeout=HANG_S)
    if tokens:
        assert answer.json()["usage"]["prompt_tokens"] == 1 + tokens  # the model's BOS
    else:
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "special_tokens"


LONG = "ab" * (1 << 18)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({LONG: 1}, "is not supported"),
        ({"model": LONG}, "is not served here"),
        ({"messages": [{"role": LONG, "content": "a"}]}, "must be one of"),
        ({"messages": [{"role": [LONG], "content": "a"}]}, "must be one of"),
        ({"messages": [{"role": "user", "content": "a", LONG: 1}]}, "is not supported"),
        ({"method": LONG}, "at most 256 characters"),
        ({"options": {LONG: 1}}, "at most 256 characters"),
        ({"options": {f"a{n}": "x" for n in range(300)}}, "has 300 entries: at most 256"),
        ({"stop": [1] * 300}, "has 300 entries: at most 256"),
        ({f"a{n}": "x" for n in range(300)}, "fields: at most 256"),
    ],
)
def test_long_field_names_are_cut_before_error_messages_quote_them(
    house: House, make_http: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], says: str
) -> None:
    compare = difflib.get_close_matches

    def compared(name: str, *known: Any, **options: Any) -> list[str]:
        assert len(name) <= 100
        return compare(name, *known, **options)

    monkeypatch.setattr(difflib, "get_close_matches", compared)
    sent = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], **fields}
    answer = post(make_http(house), json.dumps(sent).encode())
    assert answer.status_code in (400, 404) and says in answer.json()["error"]["message"]
    assert len(answer.content) < 1000


def test_parses_requests_outside_the_event_loop(
    house: House, make_http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = list[str]()

    def noting(module: Any, name: str) -> None:
        work = getattr(module, name)

        def noted(*given: Any, **options: Any) -> Any:
            readers.append(threading.current_thread().name)
            return work(*given, **options)

        monkeypatch.setattr(module, name, noted)

    noting(json_body, "from_json")
    noting(grpc_door, "read_request")
    assert post(make_http(house), chat([{"role": "user", "content": "hi"}])).status_code == 200
    assert ask(house)
    assert len(readers) == 2 and house.loop.name not in readers


# --- requests without a received body ----------------------------------------------------------------------


@pytest.fixture
def begun(make_http: Any) -> Iterator[Callable[..., Any]]:
    """Begin requests without their bodies: begun(address, token) returns the answer's first line, or None
    once the request is accepted and waits for its body."""
    with contextlib.ExitStack() as kept:

        def begin(address: str, token: str) -> bytes | None:
            host, port = address.removeprefix("http://").split(":")
            connection = kept.enter_context(socket.create_connection((host, int(port)), HANG_S))
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
            head += "Content-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n".encode())
            line = connection.recv(1000).split(b"\r\n")[0]
            return None if b" 100 " in line else line

        yield begin


def test_request_counts_against_limits_before_its_body_has_arrived(
    make_house: Callable[..., House], make_http: Any, begun: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("alpha requests=1\nbeta\n")
    house = make_house(model_name=MODEL, tokens_file=str(tmp_path / "tokens"))
    address = make_http(house)
    assert begun(address, "alpha") is None
    assert b" 429 " in begun(address, "alpha")
    assert begun(address, "beta") is None


def test_unfinished_uploads_leave_request_slots_to_other_callers(
    make_house: Callable[..., House], make_http: Any, begun: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("alpha\nbeta\ngamma\n")
    house = make_house(model_name=MODEL, tokens_file=str(tmp_path / "tokens"), max_requests=3)
    address = make_http(house)
    assert [begun(address, "alpha") for _ in range(3)] == [None] * 3
    assert b" 429 " in begun(address, "alpha")
    assert begun(address, "beta") is None
    with DeltafrontClient(house.address, "gamma") as client:
        assert list(client.generate("hi", max_tokens=1))


def test_content_length_alone_reserves_no_text_budget(
    make_house: Callable[..., House], make_http: Any, begun: Callable[..., Any]
) -> None:
    house = make_house(model_name=MODEL)
    assert [begun(make_http(house), "") for _ in range(5)] == [None] * 5
    texts = house.door._requests.text_budget
    assert len(texts._held) == 5 and not any(held.size for held in texts._held)


def test_drops_a_body_that_stops_arriving(
    house: House, make_http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "_IDLE_S", 0.1)
    host, port = make_http(house).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), HANG_S) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\nabc".encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 408 and "nothing of the request arrived" in answer.read().decode()


# --- gRPC --------------------------------------------------------------------------------------------------


GENERATE = "/deltafront.v1.DeltafrontService/Generate"


@contextlib.contextmanager
def silent(house: House, count: int, token: str = "", path: str = GENERATE) -> Iterator[list[Any]]:
    """Begin calls that send nothing."""
    with contextlib.ExitStack() as stack:
        calls = []
        for _ in range(count):
            channel = stack.enter_context(grpc.insecure_channel(house.address))
            method, waiting = channel.stream_stream(path), Never()
            metadata = [("authorization", f"Bearer {token}")] if token else None
            calls.append(method(waiting, timeout=HANG_S, metadata=metadata))
            stack.callback(waiting.close)
            stack.callback(calls[-1].cancel)
        yield calls


class Never:
    """A stream of requests that never yields one."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self.close = self._closed.set

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> bytes:
        self._closed.wait(HANG_S)
        raise StopIteration


def status(call: Any) -> tuple[grpc.StatusCode, str, bool]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error: Any = caught.value
    return error.code(), error.details(), any(key == OWN_STATUS for key, _ in error.trailing_metadata())


def ask(house: House) -> Any:
    with grpc.insecure_channel(house.address) as channel:
        method = channel.unary_stream("/deltafront.v1.DeltafrontService/Generate")
        wish = pb.GenerateRequest(prompt=pb.Prompt(text="hi"), sampling=pb.SamplingOptions(max_tokens=1))
        return list(method(wish.SerializeToString(), timeout=HANG_S))


def test_receives_only_as_many_grpc_messages_as_there_are_slots(
    make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_ROOM_TIMEOUT_S", 0.2)
    monkeypatch.setattr(places, "_RECEIVING_BYTES", 0)
    house = make_house()
    with silent(house, 4):
        with grpc.insecure_channel(house.address) as channel:
            method = channel.unary_stream("/deltafront.v1.DeltafrontService/Generate")
            wait_until(
                lambda: status(method(b"", timeout=HANG_S))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED,
                "the others are not received",
            )
            _code, details, ours = status(method(b"", timeout=HANG_S))
        assert "receives as many requests as it can hold" in details and ours
    assert ask(house)


@pytest.fixture
def guarded(make_house: Callable[..., House], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """Start a door that receives at most four messages at once, with the bearer tokens alpha and beta."""
    monkeypatch.setattr(places, "_RECEIVING_BYTES", 0)
    (tmp_path / "tokens").write_text("alpha\nbeta\n")
    return make_house(tokens_file=str(tmp_path / "tokens"))


def test_unauthenticated_call_is_refused_before_its_message(guarded: House) -> None:
    for token in ("", "gamma"):
        with silent(guarded, 1, token) as (call,):
            code, _details, ours = status(call)
        assert code is grpc.StatusCode.UNAUTHENTICATED and ours


def test_unsent_grpc_messages_leave_slots_to_other_callers(guarded: House) -> None:
    with silent(guarded, 5, "alpha") as calls, DeltafrontClient(guarded.address, "beta") as client:
        assert list(client.generate("hi", max_tokens=1))
        assert any(not call.done() for call in calls)


def test_stalled_grpc_message_gives_its_slot_to_a_waiting_one(
    make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without bearer tokens all clients are one caller, which may take all places."""
    monkeypatch.setattr(places, "_RECEIVING_BYTES", 0)
    monkeypatch.setattr(places, "_KEPT_S", 0.1)
    house = make_house()
    with silent(house, 4) as calls:
        wait_until(lambda: len(house.entrance.messages._held) == 4, "the others are not received")
        assert ask(house)
        assert sum(call.done() for call in calls) == 1
