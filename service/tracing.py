"""A request as OpenTelemetry spans: one from its arrival to its end, and below it one for each part of its
time to first token, made here from the timings that workers return. It continues the trace of the caller's
`traceparent` (W3C Trace Context), which is a header of HTTP or metadata of gRPC.

Without a provider nothing is recorded, and nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .config import CONSOLE
from .errors import Code

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_NS = 1_000_000_000
_FAULTS = (Code.INTERNAL, Code.UNKNOWN, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
"""What OpenTelemetry counts as errors of a gRPC server; others are their callers'."""
_ATTRIBUTES = {
    "request_id": "deltafront.request_id",
    "method": "deltafront.method",
    "density": "deltafront.density",
    "cached_tokens": "deltafront.cached_tokens",
    "finish": "deltafront.finish",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}
"""What is known of a request → the span's attributes; tokens by OpenTelemetry's conventions."""


@dataclass(frozen=True)
class Interval:
    """A part of a request's time, in seconds since it arrived. measured: whether `begin` is; of what a worker
    reports only the length is known, so such parts are laid one after the other."""

    part: str
    begin: float
    seconds: float
    measured: bool = True


class Tracing:
    """provider: makes the spans, and sends them; None: there are none."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("deltafront")

    def begin(self, rpc: str, headers: Iterable[tuple[str, str | bytes]]) -> Trace:
        """A request that has just arrived."""
        carrier = {name: _text(value) for name, value in headers if name in ("traceparent", "tracestate")}
        if self._tracer is None:
            parent = _PARENT.fullmatch(carrier.get("traceparent", ""))
            return Trace(parent[1] if parent else "")
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(rpc, context, SpanKind.SERVER)
        return Trace(format(span.get_span_context().trace_id, "032x"), self._tracer, span)

    def stop(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()


class Trace:
    """One request's. trace_id: 32 hexadecimal digits; without a provider the caller's, or empty."""

    def __init__(self, trace_id: str, tracer: Any = None, span: Any = None) -> None:
        self.trace_id = trace_id
        self._tracer = tracer
        self._span = span
        self._began_ns = time.time_ns()

    def end(self, facts: Mapping[str, Any], outcome: str, intervals: Sequence[Interval]) -> None:
        """facts: as in `_ATTRIBUTES`; what is None or empty is left out. outcome: `finished` or a code."""
        if self._span is None:
            return
        from opentelemetry.trace import StatusCode, set_span_in_context

        below = set_span_in_context(self._span)
        for one in intervals:
            begin, end = self._moment(one.begin), self._moment(one.begin + one.seconds)
            attributes = {"deltafront.measured": one.measured}
            part = self._tracer.start_span(one.part, below, start_time=begin, attributes=attributes)
            part.end(end)
        known = {name: facts.get(name) for name in _ATTRIBUTES}
        self._span.set_attributes({_ATTRIBUTES[k]: v for k, v in known.items() if v not in (None, "")})
        if outcome in set(Code):
            self._span.set_attribute("error.type", outcome)
        if outcome in _FAULTS:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _moment(self, seconds: float) -> int:
        """Nanoseconds since the epoch."""
        return self._began_ns + round(seconds * _NS)


def tracing(target: str, model_name: str, door: str) -> Tracing:
    """target: `door.tracing`. door: this one's name among doors. Raises ImportError for what is missing."""
    if not target:
        return Tracing()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

    exporter: SpanExporter
    if target == CONSOLE:
        exporter = ConsoleSpanExporter(out=sys.stdout, formatter=_line)
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=target)
    about = {"service.name": "deltafront", "service.instance.id": door, "gen_ai.request.model": model_name}
    provider = TracerProvider(resource=Resource.create(about))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def _line(span: ReadableSpan) -> str:
    text: str = span.to_json(indent=None)
    return text + "\n"


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "replace")
