"""The scrape port that all doors of a node share."""

import errno
import logging
import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from .metrics import Metrics

log = logging.getLogger(__name__)

_TAKEOVER_S = 2.0
_POLL_S = 0.2
"""How often it looks whether it is stopped."""
_STOP_S = 5.0


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


class Exporter:
    """Serves /metrics. It waits for the port while another door has it."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        self._metrics = metrics
        self._address = (host, port)
        self._kind = _ServerOfIPv6 if ":" in host else _Server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=_STOP_S)
        if self._thread.is_alive():
            log.warning("metrics are still served at %s:%d, %g s after their stop", *self._address, _STOP_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                server = make_server(*self._address, self._application, self._kind, _Quiet)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    log.error("metrics cannot be served at %s:%d: %s", *self._address, error)
                    return
                self._stop.wait(_TAKEOVER_S)
                continue
            with server:
                server.timeout = _POLL_S
                log.info("metrics are served at %s:%d", *self._address)
                while not self._stop.is_set():
                    server.handle_request()

    def _application(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if environ.get("PATH_INFO") not in ("/", "/metrics"):
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        body = self._metrics.expose()
        start_response("200 OK", [("Content-Type", "text/plain; version=0.0.4; charset=utf-8")])
        return [body]
