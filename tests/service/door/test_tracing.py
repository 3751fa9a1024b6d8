"""OpenTelemetry spans of requests: their contents, their traces and their export."""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import openai
import pytest
from google.protobuf.duration_pb2 import Duration
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc
from deltafront.service.config import ConfigError, parse
from deltafront.service.tracing import Tracing
from deltafront.service.wiring import make_tracing
from deltafront.workers.tracing import CONSOLE, SpanSink, provider

from ...collector import Collector
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
    """Generate over gRPC, with a new channel each time."""
    sampling = pb.SamplingOptions(max_tokens=4)
    asked = pb.GenerateRequest(**{"prompt": pb.Prompt(text="p" * 300), "sampling": sampling, **request})
    with grpc.insecure_channel(house.address) as channel:
        stub = pb_grpc.DeltafrontServiceStub(channel)
        *_, last = stub.Generate(asked, metadata=[("traceparent", parent)], timeout=HANG_S)
    finish: pb.Finish = last.finish
    return finish


def ended(spans: InMemorySpanExporter, requests: int = 1) -> list[ReadableSpan]:
    """Wait for this number of requests' spans, because spans end after their streams."""

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


def test_request_span_holds_the_doors_parts_with_their_durations(
    house: House, spans: InMemorySpanExporter
) -> None:
    finish = generate(house, attention=pb.AttentionMethod(name="dense"))
    (root,) = ended(spans)
    parts = below(spans, root)
    told = {part.name: part.seconds for part in finish.timings.parts if part.seconds}
    ordered = sorted(parts, key=lambda span: span.start_time or 0)
    doors = ["tokenize", "worker_wait", "admission"]
    assert [span.name for span in ordered] == doors, "what workers do is theirs to show"
    assert [seconds(span) for span in ordered] == pytest.approx([told[part] for part in doors], abs=1e-6)
    assert (root.start_time or 0) <= (ordered[0].start_time or 0)
    assert all((one.end_time or 0) <= (root.end_time or 0) for one in parts)
    gaps = [(b.start_time or 0) - (a.end_time or 0) for a, b in itertools.pairwise(ordered)]
    assert all(abs(gap) <= 2 for gap in gaps), "one after the other, to a nanosecond's rounding"
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
def test_request_without_traceparent_begins_a_trace(
    house: House, spans: InMemorySpanExporter, wrong: str
) -> None:
    finish = generate(house, wrong)
    (root,) = ended(spans)
    assert root.parent is None
    assert finish.trace_id == format(root.get_span_context().trace_id, "032x") not in ("0" * 32, TRACE)
    untraced = Tracing().begin("Generate", [("traceparent", wrong)], time.monotonic)
    assert untraced.trace_id == "", "the same without tracing"


def test_records_no_span_if_the_caller_does_not_sample(house: House, spans: InMemorySpanExporter) -> None:
    assert generate(house, f"00-{TRACE}-{SPAN}-00").trace_id == TRACE
    generate(house)
    (root,) = ended(spans)
    assert root.parent is not None


def test_without_tracing_only_the_callers_trace_id_is_logged(
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


def test_workers_get_the_traceparent_of_the_request(house: House, spans: InMemorySpanExporter) -> None:
    """The request's span is the parent of the workers' spans. Without a recorder workers get no trace."""
    generate(house, session_ttl=Duration(seconds=60))
    with grpc.insecure_channel(house.address) as channel:
        stub = pb_grpc.DeltafrontServiceStub(channel)
        asked = pb.PrefillRequest(prompt=pb.Prompt(text="q" * 300))
        list(stub.Prefill(asked, metadata=[("traceparent", PARENT)], timeout=HANG_S))
    generate(house, f"00-{TRACE}-{SPAN}-00", prompt=pb.Prompt(text="r" * 300))
    first, second = (f"00-{TRACE}-{root.get_span_context().span_id:016x}-01" for root in ended(spans, 2))
    assert [job.trace for job in house.group.jobs] == [first, second, ""]
    assert [told.options.trace for told in house.decode.reservations] == [first, second, ""]


def test_a_prompt_that_is_resumed_stays_one_request(house: House, spans: InMemorySpanExporter) -> None:
    """Both groups' spans are under the request's span, with the time lost between them."""
    house.group.fail_after = [2]
    finish = generate(house, attention=pb.AttentionMethod(name="dense"))
    (root,) = ended(spans)
    lost = [span for span in below(spans, root) if span.name == "replay"]
    told = {part.name: part.seconds for part in finish.timings.parts}
    assert sum(map(seconds, lost)) == pytest.approx(told["replay"], abs=1e-6) and told["replay"] > 0
    mine = f"00-{TRACE}-{root.get_span_context().span_id:016x}-01"
    assert [(job.start, job.trace) for job in house.group.jobs] == [(0, mine), (256, mine)]


@pytest.mark.parametrize(
    ("request_", "code", "status"),
    [
        ({"sampling": pb.SamplingOptions(max_tokens=-1)}, "invalid_argument", StatusCode.UNSET),
        ({}, "unavailable", StatusCode.ERROR),
    ],
)
def test_failed_request_marks_its_span_as_an_error(
    house: House, spans: InMemorySpanExporter, request_: dict[str, Any], code: str, status: StatusCode
) -> None:
    """Only the service's own faults are errors, not invalid requests."""
    house.decode.fail_after = [0] * 9
    with pytest.raises(grpc.RpcError):
        generate(house, **request_)
    (root,) = ended(spans)
    assert root.attributes is not None and root.attributes["error.type"] == code
    assert root.status.status_code is status


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.stop()


def test_spans_reach_a_collector(make_house: Callable[..., House], collector: Collector) -> None:
    sending = Tracing(provider(SpanSink(collector.url, MODEL), "door:0"))
    generate(make_house(traced=sending))
    sending.stop()
    sent = collector.spans(TRACE)
    about = sent[0].process
    assert (about["service.name"], about["service.instance.id"]) == ("deltafront", "door:0")
    assert (about["gen_ai.request.model"], about["process.pid"]) == (MODEL, os.getpid())
    (root,) = [span for span in sent if span.name == "Generate"]
    assert root.parent == SPAN
    assert {span.parent for span in sent if span is not root} == {root.id}


def test_console_exporter_prints_one_line_per_span(capsys: pytest.CaptureFixture[str]) -> None:
    sending = Tracing(provider(SpanSink(CONSOLE, MODEL), "door:0"))
    trace = sending.begin("Generate", [("traceparent", PARENT.encode())], time.monotonic)
    trace.conclude({"method": "dpxa", "finish": "stop"}, "finished", [])
    sending.stop()
    (line,) = [json.loads(one) for one in capsys.readouterr().out.splitlines()]
    assert line["context"]["trace_id"] == f"0x{TRACE}" and line["name"] == "Generate"
    assert line["attributes"] == {"deltafront.method": "dpxa", "deltafront.finish": "stop"}


def test_refuses_a_bad_tracing_address_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"model": {"path": "x"}, "decode": {"page_selection": "full"}}
    assert parse(content).door.tracing == ""
    with pytest.raises(ConfigError, match=r"door\.tracing = 'collector:4317': must be a URL, or console"):
        parse({**content, "door": {"tracing": "collector:4317"}})
    door = parse({**content, "door": {"tracing": "http://collector:4318/v1/traces"}}).door
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"door\.tracing: .*install deltafront\[otel\]"):
        make_tracing(door, "door0")
