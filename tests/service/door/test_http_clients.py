"""Other clients of OpenAI's API: Go's libraries, benchmarks, HTTP/1.0, browsers."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from deltafront.service.door import http_stream
from deltafront.service.door.http_stream import EventStream
from deltafront.workers.messages.events import LayerDensity, Progress

from ..inprocess import HANG_S, House, wait_until
from .openai_calls import JSON, LONG, MODEL
from .test_openai import lines

PATH = "/v1/completions"
Writes = list[bytes]
"""Writes the server's lines in the server's own pieces."""


async def written(comments: bool, count: int = 3) -> Writes:
    """Return a stream with two events and keep-alive lines before them."""
    parts = Writes()

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    stream = EventStream(send, comments)
    for number in range(count):
        await stream.skipped(f"read {number} of {count} tokens")
    await stream.send_json([{"n": 0}, {"n": 1}])
    await stream.write(b"data: [DONE]\n\n")
    return [part for part in parts if part]


def openai_go(writes: Writes) -> list[Any]:
    """Parse like openai-go until 3.42: every empty line ends an event, also one without data."""
    data, events = b"", []
    for line in b"".join(writes).split(b"\n")[:-1]:
        name, _, value = line.partition(b":")
        if not line:
            events.append(data.strip())
            data = b""
        elif name == b"data":
            data += value.removeprefix(b" ") + b"\n"
    return [json.loads(event) for event in events if event != b"[DONE]"]


def go_openai(writes: Writes) -> list[Any]:
    """Parse like sashabaranov/go-openai, which fails after 300 lines without data before an event."""
    empty, events = 0, []
    for line in b"".join(writes).splitlines():
        if line.strip().startswith(b"data:"):
            events, empty = [*events, line.strip()[5:].strip()], 0
        else:
            empty += 1
            assert empty <= 300, "stream has sent too many empty messages"
    return [json.loads(event) for event in events if event != b"[DONE]"]


def vllm_bench(writes: Writes) -> list[Any]:
    """Parse like `vllm bench serve`, which strips each received piece and looks for empty lines or one whole
    event."""
    held, events = "", []
    for part in writes:
        held += part.strip().decode()
        *messages, held = held.split("\n\n")
        if held == "data: [DONE]" or (held.startswith("data: ") and is_json(held[6:])):
            messages, held = [*messages, held], ""
        events += [message for message in messages if message and not message.startswith(":")]
    return [json.loads(event.removeprefix("data: ")) for event in events if event != "data: [DONE]"]


def sglang_bench(writes: Writes) -> list[Any]:
    """Parse like SGLang's bench_serving: every line that is not blank is an event."""
    found = (line.strip().removeprefix(b"data: ") for line in b"".join(writes).splitlines())
    return [json.loads(event) for event in found if event not in (b"", b"[DONE]")]


def is_json(text: str) -> bool:
    try:
        return bool(json.loads(text))
    except ValueError:
        return False


@pytest.mark.asyncio
@pytest.mark.parametrize("client", [openai_go, go_openai, vllm_bench, sglang_bench])
async def test_clients_ignore_keep_alive_lines(
    client: Callable[[Writes], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_stream, "_LINE_S", 0.0)
    assert client(await written(comments=False)) == [{"n": 0}, {"n": 1}]


@pytest.mark.asyncio
@pytest.mark.parametrize("client", [openai_go, go_openai])
async def test_go_clients_skip_progress_comments(
    client: Callable[[Writes], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_stream, "_LINE_S", 0.0)
    writes = await written(comments=True)
    assert writes[0] == b": read 0 of 3 tokens\n"
    assert client(writes) == [{"n": 0}, {"n": 1}]


@pytest.mark.asyncio
async def test_sends_keep_alive_lines_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a prompt of many small chunks would send more lines than some clients accept."""
    now = iter([index * 0.25 for index in range(2000)])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    writes = await written(comments=True, count=400)
    assert sum(part.startswith(b":") for part in writes) == 100
    assert go_openai(writes) == [{"n": 0}, {"n": 1}]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("comments", "sent"),
    [
        (True, [b": read 1 of 3 tokens\n", b": read 3 of 3 tokens, tiles 7:1.5/2000000001\n"]),
        (False, [b" \n"]),
    ],
)
async def test_comment_of_the_whole_prompt_is_always_sent(comments: bool, sent: Writes) -> None:
    parts = Writes()

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    stream = EventStream(send, comments)
    tiles = (LayerDensity(layer=7, computed=1.5, causal=2000000001.0),)
    for done in (1, 2, 3):
        await stream.progress(Progress(tokens_done=done, tokens_total=3, tiles=tiles if done > 1 else ()))
    assert [part for part in parts if part] == sent


def asked(address: str, version: str, body: Any, *headers: str) -> tuple[bytes, bytes]:
    """Read an answer until the server closes. Return head and body."""
    host, port = address.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = [f"POST {PATH} HTTP/{version}", *(f"{key}: {value}" for key, value in JSON.items())]
    head += [f"Content-Length: {len(content)}", *headers, "", ""]
    with socket.create_connection((host, int(port)), HANG_S) as connection:
        connection.sendall("\r\n".join(head).encode() + content)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    got, _, rest = answer.partition(b"\r\n\r\n")
    return got.lower(), rest


@pytest.mark.parametrize("headers", [[], ["Connection: keep-alive"]])
def test_http_1_0_answers_without_chunks_and_closes_the_connection(address: str, headers: list[str]) -> None:
    body = {"model": MODEL, "prompt": "p", "max_tokens": 2}
    head, rest = asked(address, "1.0", {**body, "stream": True}, *headers)
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert b'data: {"id": "' in rest and rest.endswith(b"data: [DONE]\n\n")
    head, rest = asked(address, "1.0", body, *headers)
    assert f"content-length: {len(rest)}".encode() in head and json.loads(rest)["usage"]
    head, rest = asked(address, "1.1", {**body, "stream": True}, "Host: x", "Connection: close")
    assert b"transfer-encoding: chunked" in head and rest.endswith(b"0\r\n\r\n")


@pytest.fixture
def audited(caplog: pytest.LogCaptureFixture) -> Callable[[], Iterator[str]]:
    caplog.set_level(logging.INFO, "deltafront.audit")

    def ids() -> Iterator[str]:
        for record in caplog.records:
            if record.name == "deltafront.audit":
                yield json.loads(record.message)["request_id"]

    return ids


@pytest.mark.parametrize("sent", [None, "mine-1"])
def test_every_answer_has_one_request_id_which_the_audit_log_has(
    address: str, audited: Callable[[], Iterator[str]], sent: str | None
) -> None:
    body = {"model": MODEL, "prompt": "p", "max_tokens": 2}
    headers = JSON | ({} if sent is None else {"x-request-id": sent})
    answers = [
        httpx.post(address + PATH, json=body, headers=headers),
        httpx.post(address + PATH, json={**body, "stream": True}, headers=headers),
        httpx.post(address + PATH, json={**body, "prompt": ""}, headers=headers),
        httpx.post(address + PATH, content=b"{", headers=headers),
        httpx.get(f"{address}/v1/models", headers=headers),
    ]
    ids = [answer.headers.get_list("x-request-id") for answer in answers]
    assert [len(found) for found in ids] == [1] * 5
    wait_until(lambda: len(list(audited())) == 5, "a line is missing")
    assert sorted(audited()) == sorted(found for (found,) in ids)
    assert sent is None or {found for (found,) in ids} == {sent}
    assert answers[0].json()["id"] == f"cmpl-{ids[0][0]}"


def test_refuses_bodies_that_are_not_declared_as_json(house: House, address: str) -> None:
    """A web page may send texts and forms to any server without a CORS preflight."""
    body = json.dumps({"model": MODEL, "prompt": "p", "max_tokens": 2})
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "x" * 5000):
        answer = httpx.post(address + PATH, content=body, headers={"content-type": kind} if kind else {})
        assert answer.status_code == 415 and len(answer.text) < 500
        assert "send application/json" in answer.json()["error"]["message"]
    assert not house.group.jobs
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        assert httpx.post(address + PATH, content=body, headers={"content-type": kind}).status_code == 200


def test_web_pages_may_call_only_from_configured_origins(
    house: House, address: str, make_http: Callable[..., str]
) -> None:
    page = {"origin": "https://chat.example.org"}
    before = {**page, "access-control-request-method": "POST",
              "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    assert httpx.options(address + PATH, headers=before).status_code == 405
    assert "access-control-allow-origin" not in httpx.get(f"{address}/v1/models", headers=page).headers
    allowed = make_http(house, origins=[page["origin"]])
    preflight = httpx.options(allowed + PATH, headers=before)
    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    for answer in (
        httpx.post(allowed + PATH, json={"model": MODEL, "prompt": "p", "max_tokens": 2}, headers=page),
        httpx.post(allowed + PATH, json={"model": MODEL, "prompt": ""}, headers=page),
    ):
        assert answer.headers["access-control-allow-origin"] == page["origin"]
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    other = httpx.options(allowed + PATH, headers={**before, "origin": "https://evil.example.org"})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


def test_clients_read_a_stream_with_keep_alive_lines(house: House, make_http: Any) -> None:
    house.group.pause_at = 0
    stream = lines(make_http(house, keep_alive_s=0.01), {"prompt": LONG, "max_tokens": 3})
    assert next(stream) == " "
    house.group.pause_at = -1
    assert len(sglang_bench([f"{line}\n".encode() for line in stream])) == 4
