"""Server-sent events, and a stream of events that ends when its client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
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
    """Server-sent events as an ASGI response; begun: whether the status is out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def objects(self, objects: Sequence[Any]) -> None:
        for one in objects:
            await self.write(b"data: " + json.dumps(one, ensure_ascii=False).encode() + b"\n\n")

    async def comment(self, text: str) -> None:
        await self.write(f": {text}\n\n".encode())

    async def write(self, data: bytes) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def watched(
    events: AsyncGenerator[RequestEvent, None], receive: Receive, silence_s: float
) -> AsyncGenerator[RequestEvent | None, None]:
    """The events, and None after each silence. Raises ClientDisconnect when the client leaves.

    Closing it, or being cancelled in it, closes `events`, which frees whatever the request holds.
    """
    gone, coming = asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(anext(events))
    try:
        while True:
            await asyncio.wait((coming, gone), timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                try:
                    event = coming.result()
                except StopAsyncIteration:
                    return
                coming = asyncio.ensure_future(anext(events))
                yield event
            elif gone.done():
                raise ClientDisconnect
            else:
                yield None
    finally:
        gone.cancel()
        coming.cancel()
        await asyncio.gather(gone, coming, return_exceptions=True)
        await events.aclose()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
