"""Tests spans without a provider, and spans that are recorded after the work."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.trace import StatusCode

from .spans import PARENT, Recorder

UNTRACED = """
import sys
from deltafront.workers.decode import engine
from deltafront.workers.prefill.group import controller
from deltafront.workers.prefill.stage import stage
from deltafront.workers.tracing import NO_SPAN, SpanSink, Tracer, provider

tracer = Tracer(provider(SpanSink(), "me"))
span = tracer.begin("prefill", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", lambda: 2.0, 1.0)
assert span is NO_SPAN is span.begin("chunk", 1.0) and span.context == ""
span.part("queue", 1.0, 2.0)
span.end("failed", "an error")
tracer.done("stage", "", 1.0, "an error")
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


def test_without_tracing_a_worker_does_not_import_opentelemetry() -> None:
    command = [sys.executable, "-c", UNTRACED]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_finished_work_becomes_a_span_of_its_duration() -> None:
    recorder = Recorder()
    recorder.tracer.done("stage", PARENT, 1.5, finish="finished", stage=1)
    recorder.tracer.done("stage", PARENT, 0.5, "out of memory", finish="failed", stage=1)
    recorder.tracer.done("stage", "", 0.5, finish="finished", stage=1)
    recorder.tracer.done("stage", f"{PARENT[:-2]}00", 0.5, finish="finished", stage=1)
    good, bad = recorder.spans
    assert [recorder.seconds(good), recorder.seconds(bad)] == pytest.approx([1.5, 0.5])
    assert good.attributes == {"deltafront.finish": "finished", "deltafront.stage": 1}
    assert (bad.status.status_code, bad.status.description) == (StatusCode.ERROR, "out of memory")
    assert good.parent is not None and recorder.under(None) == [good, bad]
