"""The Prometheus scrape port that all doors of a node share. Idle connections take no thread."""

import asyncio
import contextlib
import errno
import logging
import threading
from asyncio import StreamReader, StreamWriter

from deltafront.service.metrics import Metrics

log = logging.getLogger(__name__)

_TAKEOVER_S = 2.0
_STOP_S = 5.0
_CONNECTIONS = 100
"""The most open connections without a request. A further connection ends the oldest one."""
_REQUEST_S = 10.0
"""How long a scrape may take, including its request."""
_HEAD_BYTES = 1 << 14
_TYPES = {200: "text/plain; version=0.0.4; charset=utf-8", 404: "text/plain", 405: "text/plain"}
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed"}


class Exporter:
    """Serves /metrics. While another door of the node holds the port, this exporter waits for it."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        self._metrics = metrics
        self._address = (host, port)
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._waiting: dict[StreamWriter, None] = {}
        """Connections whose request has not arrived, the oldest first."""
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the thread could not listen, and has ended
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(timeout=_STOP_S)
        if self._thread.is_alive():
            log.warning("metrics are still served at %s:%d, %g s after their stop", *self._address, _STOP_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        while not self._stopped.is_set():
            try:
                server = await asyncio.start_server(self._answer, *self._address, limit=_HEAD_BYTES)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    log.error("metrics cannot be served at %s:%d: %s", *self._address, error)
                    return
                await self._pause()
                continue
            log.info("metrics are served at %s:%d", *self._address)
            async with server:
                await self._stopped.wait()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TAKEOVER_S):
                await self._stopped.wait()

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_S):
                head = await self._head(reader, writer)
                writer.write(await self._response(*head.split(b" ", 2)[:2]))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, EOFError, ValueError, TypeError, asyncio.LimitOverrunError):
            writer.transport.abort()

    async def _head(self, reader: StreamReader, writer: StreamWriter) -> bytes:
        if len(self._waiting) >= _CONNECTIONS:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()
        self._waiting[writer] = None
        try:
            return await reader.readuntil(b"\r\n\r\n")
        finally:
            self._waiting.pop(writer, None)

    async def _response(self, method: bytes, target: bytes) -> bytes:
        if method not in (b"GET", b"HEAD"):
            status, body = 405, b"use GET\n"
        elif target.partition(b"?")[0] not in (b"/", b"/metrics"):
            status, body = 404, b"metrics are at /metrics\n"
        else:
            status, body = 200, await asyncio.to_thread(self._metrics.expose)
        lines = (
            f"HTTP/1.1 {status} {_REASONS[status]}",
            f"Content-Type: {_TYPES[status]}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        head = "".join(f"{line}\r\n" for line in (*lines, "")).encode()
        return head + (b"" if method == b"HEAD" else body)
