"""Server-sent events, and a stream that ends when its client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send

from ..request.answers import RequestEvent

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""The last one asks nginx to pass events on at once."""


class EventStream:
    """An ASGI response. `started` tells whether the status is out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def send_json(self, objects: Iterable[Any]) -> None:
        for value in objects:
            await self.write(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")

    async def comment(self, text: str) -> None:
        await self.write(f": {text}\n\n".encode())

    async def write(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(
    events: AsyncGenerator[RequestEvent, None], receive: Receive, keep_alive_s: float
) -> AsyncGenerator[RequestEvent | None, None]:
    """Yield the events, and None after each silence. Raises ClientDisconnect.

    Closing it closes `events`, which frees whatever the request holds.
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
