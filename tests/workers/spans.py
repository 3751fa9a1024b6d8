"""Keeps trace spans in memory."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider

from deltafront.workers.tracing import Tracer

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{CALLER}-01"


class Recorder(SpanProcessor):
    """Keeps its tracer's finished spans, in `spans`. `begun` is the number of spans that have begun."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.begun = 0
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(self)
        self.tracer = Tracer(provider)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self.begun += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def under(self, parent: ReadableSpan | None) -> list[ReadableSpan]:
        """Return a span's children in order of their start; None: the children of the caller's span."""
        number = int(CALLER, 16) if parent is None else parent.get_span_context().span_id
        found = [span for span in self.spans if span.parent is not None and span.parent.span_id == number]
        assert all(span.get_span_context().trace_id == int(TRACE, 16) for span in found)
        return sorted(found, key=lambda span: span.start_time or 0)

    @staticmethod
    def context(span: ReadableSpan) -> str:
        """Return the span's `traceparent`."""
        return f"00-{TRACE}-{span.get_span_context().span_id:016x}-01"

    @staticmethod
    def seconds(span: ReadableSpan) -> float:
        assert span.start_time is not None and span.end_time is not None
        return 1e-9 * (span.end_time - span.start_time)
