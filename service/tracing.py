"""OpenTelemetry spans: one for a request, and below it the door's parts of the time to first token.

Workers add their own spans (`workers/tracing.py`). Without a provider OpenTelemetry is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltafront.service.errors import Code
from deltafront.workers.tracing import Clock, Span, wall_ns

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_FAULTS = (Code.INTERNAL, Code.UNKNOWN, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
"""The codes that OpenTelemetry counts as errors of a gRPC server."""
_ATTRIBUTES = {
    "request_id": "deltafront.request_id",
    "method": "deltafront.method",
    "density": "deltafront.density",
    "cached_tokens": "deltafront.cached_tokens",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}
"""The span attribute of each fact. Token counts have OpenTelemetry's names."""


@dataclass(frozen=True)
class Interval:
    """A part of the time to first token. `begin` is seconds after the request's arrival."""

    part: str
    begin: float
    seconds: float


class Trace(Span):
    """A request's trace span. trace_id: 32 hexadecimal digits; without a span, the caller's trace id or
    empty."""

    def __init__(self, trace_id: str, *recorded: Any) -> None:
        super().__init__(*recorded)
        self.trace_id = trace_id

    def conclude(self, facts: Mapping[str, Any], outcome: str, intervals: Sequence[Interval]) -> None:
        """End the span. facts: values for `_ATTRIBUTES`, and `finish`. outcome: `finished` or error code."""
        if self._span is None:
            return
        for interval in intervals:
            self.part(interval.part, interval.begin, interval.begin + interval.seconds)
        known = {name: facts.get(name) for name in _ATTRIBUTES}
        self._span.set_attributes({_ATTRIBUTES[k]: v for k, v in known.items() if v not in (None, "")})
        if outcome in set(Code):
            self._span.set_attribute("error.type", outcome)
        self.end(facts["finish"], outcome if outcome in _FAULTS else "")


class Tracing:
    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("deltafront")

    def begin(self, rpc: str, headers: Iterable[tuple[str, str | bytes]], clock: Clock) -> Trace:
        """Begin a span that continues the caller's W3C `traceparent`. clock: seconds since arrival."""
        carrier = {
            name: value if isinstance(value, str) else value.decode("ascii", "replace")
            for name, value in headers
            if name in ("traceparent", "tracestate")
        }
        if self._tracer is None:
            parent = _PARENT.fullmatch(carrier.get("traceparent", ""))
            return Trace(parent[1] if parent else "")
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(rpc, context, SpanKind.SERVER, start_time=wall_ns(clock()))
        trace_id = format(span.get_span_context().trace_id, "032x")
        return Trace(trace_id, self._tracer, span, clock) if span.is_recording() else Trace(trace_id)

    def stop(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()
