"""OpenTelemetry spans of the processes that work on a request.

Messages carry the parent span as a W3C `traceparent`. Without a `traceparent` or a provider, nothing is
recorded and OpenTelemetry is not imported. A span's start is measured by the host's wall clock, its duration
by the process's monotonic clock.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer as OtelTracer

CONSOLE = "console"
_NS = 1_000_000_000
_DELAY_MS = 1000.0
"""Milliseconds for which finished spans are buffered before export. A killed process loses them."""

Clock = Callable[[], float]
"""Returns seconds, and never goes back."""


@dataclass(frozen=True)
class SpanSink:
    """The destination of spans.

    Attributes:
        target: The OTLP/HTTP URL of a collector; CONSOLE for stdout; empty: spans are not recorded.
        model: The model's name in spans.
    """

    target: str = ""
    model: str = ""


class Span:
    """A trace span of one request. Without arguments it records nothing.

    Args:
        clock: The clock of all times that this span is given.
        since: The start time on `clock`.
    """

    def __init__(
        self,
        tracer: OtelTracer | None = None,
        span: Any = None,
        clock: Clock = time.monotonic,
        since: float = 0.0,
    ) -> None:
        self._tracer = tracer
        self._span = span
        self._clock = clock
        self._since = since
        self._since_ns = 0 if span is None else span.start_time

    @property
    def context(self) -> str:
        """The `traceparent` to send to other processes for child spans; empty if not traced."""
        if self._span is None:
            return ""
        known = self._span.get_span_context()
        return f"00-{known.trace_id:032x}-{known.span_id:016x}-{known.trace_flags:02x}"

    def begin(self, name: str, since: float, **attributes: Any) -> Span:
        if self._tracer is None:
            return NO_SPAN
        began, about = self._moment(since), _named(attributes)
        span = self._tracer.start_span(name, self._below(), attributes=about, start_time=began)
        return Span(self._tracer, span, self._clock, since)

    def part(self, name: str, begin: float | None, end: float | None) -> None:
        """Record a child span between two times on this span's clock. Does nothing if one of them is None or
        `end` is not after `begin`."""
        if self._tracer is not None and begin is not None and end is not None and end > begin:
            span = self._tracer.start_span(name, self._below(), start_time=self._moment(begin))
            span.end(self._moment(end))

    def end(self, finish: str, error: str = "", **attributes: Any) -> None:
        """End the span.

        Args:
            finish: The finish reason, one word.
            error: The error message, one line.
        """
        if self._span is not None:
            self._span.set_attributes(_named({"finish": finish, **attributes}))
            if error:
                from opentelemetry.trace import Status, StatusCode

                self._span.set_status(Status(StatusCode.ERROR, error))
            self._span.end(self._moment(self._clock()))

    def _below(self) -> Any:
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._span)

    def _moment(self, seconds: float) -> int:
        return int(self._since_ns + round((seconds - self._since) * _NS))


NO_SPAN = Span()


class Tracer:
    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = None if provider is None else provider.get_tracer("deltafront")

    def begin(self, name: str, parent: str, clock: Clock, since: float, **attributes: Any) -> Span:
        if self._tracer is None or not parent:
            return NO_SPAN
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": parent})
        began, about = wall_ns(clock() - since), _named(attributes)
        span = self._tracer.start_span(name, context, attributes=about, start_time=began)
        return Span(self._tracer, span, clock, since) if span.is_recording() else NO_SPAN

    def done(
        self, name: str, parent: str, seconds: float, error: str = "", finish: str = "", **attributes: Any
    ) -> None:
        """Record work that took `seconds` and ends now."""
        self.begin(name, parent, lambda: seconds, 0.0, **attributes).end(finish, error)


NO_TRACER = Tracer()


def wall_ns(ago: float) -> int:
    """Return the time `ago` seconds before now, in nanoseconds since the epoch."""
    return time.time_ns() - round(ago * _NS)


def provider(sink: SpanSink, instance: str) -> TracerProvider | None:
    """Make the provider that exports this process's spans; None if `sink` has no target.

    `instance` is the process's name in spans. Raises ImportError if OpenTelemetry is not installed.
    """
    if not sink.target:
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

    exporter: SpanExporter
    if sink.target == CONSOLE:
        exporter = ConsoleSpanExporter(
            out=sys.stdout, formatter=lambda span: span.to_json(indent=None) + "\n"
        )
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=sink.target)
    about: dict[str, Any] = {
        "service.name": "deltafront",
        "service.instance.id": instance,
        "process.pid": os.getpid(),
        "host.name": socket.gethostname(),
        "gen_ai.request.model": sink.model,
    }
    made = TracerProvider(resource=Resource.create(about))
    made.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_DELAY_MS))
    return made


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"deltafront.{name}": value for name, value in attributes.items()}
