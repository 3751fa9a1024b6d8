"""Streamed answers over HTTP: server-sent events, until they end or the client disconnects."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http import httptools_impl

from deltafront.service.request.answers import RequestEvent
from deltafront.workers.messages.events import Progress

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""Headers of a stream. The last one tells nginx not to buffer events."""
EXPECTED_HEADER = "x-expected-first-token-seconds"
_RESPONSE = "response"
"""The key of the Responses API's events that hold the whole response, with the tools and instructions of the
request. A thread serialises these events, because they may be large."""
_LINE_S = 1.0
"""The shortest time between two keep-alive lines. Some clients give up after 300 of them."""
EMPTY_LINE = b" \n"
"""The keep-alive line: a field without name and value, which clients skip. The standard also allows a
comment, but benchmarks of vLLM and SGLang take a comment for the beginning of an event. A line without the
space would end an event."""


class EventStream:
    """A response of server-sent events. `started`: true if the HTTP status was sent.

    Args:
        comments: True if comment lines report prefill progress.
        named: True if events are named by their object's `type`.
        headers: Additional HTTP headers.
    """

    def __init__(
        self,
        send: Send,
        comments: bool = False,
        named: bool = False,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._send = send
        self._comments = comments
        self._named = named
        self._skipped_at = -_LINE_S
        self._headers = _HEADERS + [(name.encode(), value.encode()) for name, value in headers.items()]
        self._expected = False
        self.started = False

    async def send_json(self, objects: Iterable[Any]) -> None:
        for value in objects:
            if _RESPONSE in value:
                await self.write(await asyncio.to_thread(self._event, value))
            else:
                await self.write(self._event(value))

    def _event(self, value: Any) -> bytes:
        name = f"event: {value['type']}\n" if self._named else ""
        return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()

    async def progress(self, event: Progress) -> None:
        """Report how much of the prompt was read, in a comment if those are asked for. The whole prompt's is
        sent in any case."""
        done, total, tiles = event.tokens_done, event.tokens_total, ""
        if self._comments and event.tiles:
            by_layer = (f"{tile.layer}:{tile.computed:.10g}/{tile.causal:.10g}" for tile in event.tiles)
            tiles = f", tiles {' '.join(by_layer)}"
        await self.skipped(f"read {done} of {total} tokens{tiles}", always=self._comments and done == total)

    async def skipped(self, comment: str, always: bool = False) -> None:
        """Send a keep-alive line, which clients skip, unless the last one was just sent. A comment ends with
        one newline, because some clients take a comment with two for an event."""
        if (now := time.monotonic()) - self._skipped_at >= _LINE_S or always:
            self._skipped_at = now
            await self.write(f": {comment}\n".encode() if self._comments else EMPTY_LINE)

    async def expect(self, seconds: float) -> None:
        """Say in a header when the first token is expected. If the wait is at least _LINE_S, the header is
        sent at once. Otherwise it is sent with the first data, so that an earlier error can have its own HTTP
        status. Calls after the first do nothing.
        """
        if self._expected:
            return
        self._expected = True
        self._headers.append((EXPECTED_HEADER.encode(), f"{seconds:.3f}".encode()))
        if seconds >= _LINE_S:
            await self.skipped(f"first token expected in {seconds:.1f} s")

    async def write(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(
    events: AsyncGenerator[RequestEvent, None], receive: Receive, keep_alive_s: float
) -> AsyncGenerator[RequestEvent | None, None]:
    """Yield the events, and None after each silence of keep_alive_s. Raises ClientDisconnect.

    Closing this iterator closes `events`, which frees all resources of the request.
    """
    gone, next_event = asyncio.ensure_future(_disconnected(receive)), asyncio.ensure_future(anext(events))
    try:
        while True:
            await asyncio.wait((next_event, gone), timeout=keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
            if next_event.done():
                try:
                    event = next_event.result()
                except StopAsyncIteration:
                    return
                next_event = asyncio.ensure_future(anext(events))
                yield event
            elif gone.done():
                raise ClientDisconnect
            else:
                yield None
    finally:
        gone.cancel()
        next_event.cancel()
        await asyncio.gather(gone, next_event, return_exceptions=True)
        await events.aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def answer_http_1_0_without_chunks() -> None:
    """Make this process's uvicorn send no chunked encoding to HTTP/1.0, which lacks it (RFC 9112, 6.1)."""
    httptools_impl.RequestResponseCycle = _Response  # type: ignore[misc]


class _Response(httptools_impl.RequestResponseCycle):
    """uvicorn's answer, but without chunks for HTTP/1.0. In HTTP/1.0, closing the connection ends an answer
    without a Content-Length."""

    _until_closed = False

    async def send(self, message: ASGISendEvent) -> None:
        if self.scope["http_version"] == "1.0":
            self._without_chunks(message)
        await super().send(message)

    def _without_chunks(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            headers = message.get("headers", [])
            self._until_closed = not any(name.lower() == b"content-length" for name, _ in headers)
            if self._until_closed:
                self.chunked_encoding, self.keep_alive = False, False
                self.expected_content_length = sys.maxsize
        elif message["type"] == "http.response.body" and self._until_closed and not message.get("more_body"):
            self.expected_content_length = len(message.get("body", b""))
