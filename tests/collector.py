"""A collector of OpenTelemetry spans (OTLP over HTTP)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Sent:
    """A received span. parent: empty for none. process: the resource's attributes. seconds: duration."""

    trace: str
    id: str
    parent: str
    name: str
    seconds: float
    failed: bool
    attributes: dict[str, Any] = field(repr=False)
    process: dict[str, Any] = field(repr=False)


class Collector:
    """Collects the spans that are posted to `url`."""

    def __init__(self) -> None:
        self._sent: list[Sent] = []
        sent = self._sent

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                known = self.path == "/v1/traces"
                if known:
                    sent.extend(_spans(ExportTraceServiceRequest.FromString(body)))
                self.send_response(200 if known else 404)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = "http://{}:{}/v1/traces".format(*self._server.server_address)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def spans(self, trace: str) -> list[Sent]:
        """Return the received spans of a trace."""
        return [span for span in list(self._sent) if span.trace == trace]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_PATIENCE_S)


def _spans(request: ExportTraceServiceRequest) -> list[Sent]:
    return [
        Sent(
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.name,
            1e-9 * (span.end_time_unix_nano - span.start_time_unix_nano),
            span.status.code == span.status.STATUS_CODE_ERROR,
            _plain(span.attributes),
            _plain(resource.resource.attributes),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
