"""Requests as OpenTelemetry spans: what they hold, whose trace they continue, where they go."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc
from deltafront.service.config import ConfigError, parse
from deltafront.service.tracing import Tracing, tracing
from deltafront.service.wiring import traced

from ..inprocess import HANG_S, House, wait_until
from .openai_calls import HI, MODEL

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
NS = 1e-9


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def house(make_house: Callable[..., House], spans: InMemorySpanExporter) -> House:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return make_house(model_name=MODEL, traced=Tracing(provider))


def generate(house: House, parent: str = PARENT, **request: Any) -> pb.Finish:
    """Over gRPC; a new channel each time."""
    sampling = pb.SamplingOptions(max_tokens=4)
    asked = pb.GenerateRequest(**{"prompt": pb.Prompt(text="p" * 300), "sampling": sampling, **request})
    with grpc.insecure_channel(house.address) as channel:
        stub = pb_grpc.DeltafrontServiceStub(channel)
        *_, last = stub.Generate(asked, metadata=[("traceparent", parent)], timeout=HANG_S)
    finish: pb.Finish = last.finish
    return finish


def ended(spans: InMemorySpanExporter, requests: int = 1) -> list[ReadableSpan]:
    """The requests' own spans, as soon as there are so many: they end after their streams."""

    def roots() -> list[ReadableSpan]:
        return [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]

    wait_until(lambda: len(roots()) == requests, "a request has no span")
    return roots()


def below(spans: InMemorySpanExporter, root: ReadableSpan) -> list[ReadableSpan]:
    number = root.get_span_context().span_id
    return [span for span in spans.get_finished_spans() if span.parent and span.parent.span_id == number]


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) * NS


def test_a_requests_parts_lie_within_it_and_last_as_long_as_is_told(
    house: House, spans: InMemorySpanExporter
) -> None:
    finish = generate(house, attention=pb.AttentionMethod(name="dense"))
    (root,) = ended(spans)
    parts = below(spans, root)
    told = {part.name: part.seconds for part in finish.timings.parts if part.seconds}
    lasted: dict[str, float] = {}
    for span in parts:
        lasted[span.name] = lasted.get(span.name, 0.0) + seconds(span)
    assert lasted == pytest.approx(told, abs=1e-6)
    assert "prefill.attention" in lasted and "first_step" in lasted, "what workers returned"
    ordered = sorted(parts, key=lambda span: span.start_time or 0)
    assert [span.name for span in ordered][:2] == ["tokenize", "worker_wait"]
    assert (root.start_time or 0) <= (ordered[0].start_time or 0)
    assert all((one.end_time or 0) <= (root.end_time or 0) for one in parts)
    gaps = [(b.start_time or 0) - (a.end_time or 0) for a, b in itertools.pairwise(ordered)]
    assert all(abs(gap) <= 2 for gap in gaps), "one after the other, to a nanosecond's rounding"
    measured = {span.name for span in parts if (span.attributes or {})["deltafront.measured"]}
    assert measured == {"tokenize", "worker_wait", "admission"}, "of the others only lengths are known"
    assert root.attributes is not None
    assert {name: root.attributes[name] for name in root.attributes if name != "deltafront.request_id"} == {
        "deltafront.method": "dense",
        "deltafront.density": finish.density.mean,
        "deltafront.cached_tokens": 0,
        "deltafront.finish": "length",
        "gen_ai.usage.input_tokens": 301,
        "gen_ai.usage.output_tokens": 4,
    }
    assert root.name == "Generate" and root.status.status_code is StatusCode.UNSET


def test_grpc_and_http_continue_their_callers_trace(
    house: House, spans: InMemorySpanExporter, make_http: Callable[..., str]
) -> None:
    finish = generate(house)
    with openai.OpenAI(base_url=f"{make_http(house)}/v1", api_key="any", max_retries=0) as api:
        done = api.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=3, extra_headers={"traceparent": PARENT}
        )
    assert finish.trace_id == done.model_extra["deltafront"]["trace_id"] == TRACE  # type: ignore[index]
    roots = ended(spans, 2)
    assert {format(root.get_span_context().trace_id, "032x") for root in roots} == {TRACE}
    assert {format(root.parent.span_id, "016x") for root in roots if root.parent} == {SPAN}


@pytest.mark.parametrize(
    "wrong", ["", "00-xyz", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01"]
)
def test_without_a_caller_a_trace_begins_here(house: House, spans: InMemorySpanExporter, wrong: str) -> None:
    finish = generate(house, wrong)
    (root,) = ended(spans)
    assert root.parent is None
    assert finish.trace_id == format(root.get_span_context().trace_id, "032x") not in ("0" * 32, TRACE)
    assert Tracing().begin("Generate", [("traceparent", wrong)]).trace_id == "", "the same without tracing"


def test_what_its_caller_does_not_record_is_not_recorded(house: House, spans: InMemorySpanExporter) -> None:
    assert generate(house, f"00-{TRACE}-{SPAN}-00").trace_id == TRACE
    generate(house)
    (root,) = ended(spans)
    assert root.parent is not None


def test_without_tracing_the_callers_trace_is_told_and_nothing_recorded(
    make_house: Callable[..., House], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deltafront.audit")
    house = make_house()
    assert generate(house).trace_id == TRACE
    assert generate(house, "").trace_id == ""

    def lines() -> list[Any]:
        records = [one for one in caplog.records if one.name == "deltafront.audit"]
        return [json.loads(one.message)["trace_id"] for one in records]

    wait_until(lambda: len(lines()) == 2, "a request has no line")
    assert lines() == [TRACE, ""]


@pytest.mark.parametrize(
    ("request_", "code", "status"),
    [
        ({"sampling": pb.SamplingOptions(max_tokens=-1)}, "invalid_argument", StatusCode.UNSET),
        ({}, "unavailable", StatusCode.ERROR),
    ],
)
def test_a_request_that_fails_says_how(
    house: House, spans: InMemorySpanExporter, request_: dict[str, Any], code: str, status: StatusCode
) -> None:
    """An error is the service's; what its caller did wrong is not."""
    house.decode.fail_after = [0] * 9
    with pytest.raises(grpc.RpcError):
        generate(house, **request_)
    (root,) = ended(spans)
    assert root.attributes is not None and root.attributes["error.type"] == code
    assert root.status.status_code is status


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """No news."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = "http://{}:{}/v1/traces".format(*self._server.server_address)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(HANG_S)


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.stop()


def test_spans_reach_a_collector(make_house: Callable[..., House], collector: Collector) -> None:
    sending = tracing(collector.url, MODEL, "door0")
    generate(make_house(traced=sending))
    sending.stop()
    ((path, sent),) = collector.requests
    assert path == "/v1/traces"
    (resource,) = sent.resource_spans
    about = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert about["service.name"] == "deltafront"
    assert (about["service.instance.id"], about["gen_ai.request.model"]) == ("door0", MODEL)
    (scope,) = resource.scope_spans
    assert {span.trace_id.hex() for span in scope.spans} == {TRACE}
    (root,) = [span for span in scope.spans if span.name == "Generate"]
    assert root.parent_span_id.hex() == SPAN
    assert {span.parent_span_id for span in scope.spans if span is not root} == {root.span_id}


def test_the_console_gets_a_line_a_span(capsys: pytest.CaptureFixture[str]) -> None:
    sending = tracing("console", MODEL, "door0")
    trace = sending.begin("Generate", [("traceparent", PARENT.encode())])
    trace.end({"method": "dpxa"}, "finished", [])
    sending.stop()
    (line,) = [json.loads(one) for one in capsys.readouterr().out.splitlines()]
    assert line["context"]["trace_id"] == f"0x{TRACE}" and line["attributes"] == {"deltafront.method": "dpxa"}


def test_where_spans_go_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"model": {"path": "x"}, "decode": {"page_selection": "full"}}
    assert parse(content).door.tracing == ""
    with pytest.raises(ConfigError, match=r"door\.tracing = 'collector:4317': must be a URL, or console"):
        parse({**content, "door": {"tracing": "collector:4317"}})
    door = parse({**content, "door": {"tracing": "http://collector:4318/v1/traces"}}).door
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"door\.tracing: .*install deltafront\[otel\]"):
        traced(door, "door0")
