"""Tests trace spans of prompts and chunks, from a controller and from a stage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from deltafront.kernels.methods import method_spec
from deltafront.workers.messages.events import ChunkRead, PrefillDone
from deltafront.workers.messages.requests import PrefillFailed, Refused
from deltafront.workers.messages.stages import ChunkCommand, OpenRequest, RequestFailed
from deltafront.workers.prefill.group.controller import PrefillController
from deltafront.workers.settings import ModelSpec, PrefillConfig

from ..spans import PARENT, Recorder
from ..timeless import timeless
from ..tiny_model import make_tiny_model, random_ids
from .fake_stages import FakeStage, assert_clean, collect, controller_of, job, no_trouble
from .test_prefill_stage import Collector
from .test_stage import run_chunk, stage_of


def traced(
    recorder: Recorder, trouble: Callable[[str], None] = no_trouble, pause_s: float = 0.0005
) -> tuple[PrefillController, list[FakeStage]]:
    fakes = [FakeStage(stage, lambda: pause_s, trouble) for stage in range(2)]
    config = PrefillConfig(stages=2, chunk_tokens=128, cache_tokens=1024, stream_lease_s=600.0)
    return controller_of(fakes, config, tracer=recorder.tracer), fakes


def finished(span: ReadableSpan) -> Any:
    return (span.attributes or {})["deltafront.finish"]


@timeless
async def test_prompt_span_contains_its_queue_time_and_chunks() -> None:
    """The span begins when the prompt arrives. Its queue part ends at the time that the report gives."""
    recorder = Recorder()
    controller, fakes = traced(recorder)
    first, second = await asyncio.gather(
        collect(controller, job("a", 256)), collect(controller, job("b", 300, trace=PARENT))
    )
    assert isinstance(first[-1], PrefillDone), "nobody records it"
    (root,) = recorder.under(None)
    assert (root.name, finished(root)) == ("prefill", "finished")
    assert root.attributes is not None and root.attributes["deltafront.tokens_done"] == 300
    queue, *chunks = recorder.under(root)
    assert (queue.name, {chunk.name for chunk in chunks}) == ("queue", {"chunk"})
    assert recorder.seconds(queue) == pytest.approx(second[-1].report.queue, abs=2e-9)
    assert queue.start_time == root.start_time
    read = [(c.attributes or {})["deltafront.start"] for c in chunks]
    assert read == [0, 128, 256] and {finished(chunk) for chunk in chunks} == {"finished"}
    assert max(chunk.end_time or 0 for chunk in chunks) == root.end_time
    assert len(recorder.spans) == 5
    await assert_clean(controller, fakes)


@timeless
async def test_stage_gets_its_chunks_trace_context() -> None:
    recorder, told = Recorder(), []
    controller, fakes = traced(recorder)
    computed = fakes[1].run_batch

    def run_batch(commands: Any) -> Any:
        told.extend(command.trace for command in commands)
        return computed(commands)

    fakes[1].run_batch = run_batch  # type: ignore[method-assign]
    await collect(controller, job("a", 200, trace=PARENT))
    await collect(controller, job("b", 100))
    chunks = [span for span in recorder.spans if span.name == "chunk"]
    assert told == [*(recorder.context(chunk) for chunk in chunks), ""]


@pytest.mark.parametrize(
    ("way", "finish", "error"),
    [
        ("request", "failed", "it overflowed"),
        ("group", "failed", "a stage is gone"),
        ("cancel", "cancelled", None),
        ("left", "cancelled", None),
        ("deadline", "deadline", None),
    ],
)
def test_span_ends_however_its_request_ends(way: str, finish: str, error: str | None) -> None:
    recorder = Recorder()

    def trouble(_request_id: str) -> None:
        if way == "request":
            raise RequestFailed("it overflowed")
        if way == "group":
            raise RuntimeError("a stage is gone")

    @timeless
    async def run() -> None:
        controller, _ = traced(recorder, trouble, 20.0)
        deadline = time.time() + 30 if way == "deadline" else None
        stream = controller.prefill(job("a", 300, trace=PARENT, deadline=deadline))
        if error is not None:
            with pytest.raises(PrefillFailed, match=error):
                await anext(stream)
        else:
            assert isinstance(await anext(stream), Refused if way == "deadline" else ChunkRead)
        if way == "cancel":
            await controller.cancel("a")
        await stream.aclose()
        await controller.stop()

    run()
    (root,) = recorder.under(None)
    assert finished(root) == finish
    assert root.status.status_code is (StatusCode.UNSET if error is None else StatusCode.ERROR)
    assert (error or "") in (root.status.description or "")
    assert "chunk" in {span.name for span in recorder.under(root)}
    assert recorder.begun == len(recorder.spans), "one that began has not ended"


def test_stage_spans_show_finished_and_failed_chunks(tmp_path: Path) -> None:
    """Each span is a child of its chunk's span. An abandoned chunk is not an error."""
    model, recorder = ModelSpec(path=str(make_tiny_model(tmp_path)), dtype="float32"), Recorder()
    stage = stage_of(model, Collector(), recorder.tracer)
    command = ChunkCommand(
        request_id="r",
        start=0,
        tokens=128,
        last=False,
        wants_logits=True,
        token_ids=random_ids(128),
        trace=PARENT,
    )
    opening = OpenRequest(
        request_id="r",
        pages=tuple(range(16)),
        prompt_tokens=256,
        method=method_spec("dense"),
        decode_worker="decode:x",
        serial=7,
    )
    stage.open(opening)
    report = run_chunk(stage, command)
    run_chunk(stage, replace(command, start=128, last=True, trace=""))
    stage.abandon(7)
    for error in ("abandoned", "not open"):
        with pytest.raises(RequestFailed, match=error):
            run_chunk(stage, command)
    computed, abandoned, failed = recorder.under(None)
    assert [span.name for span in recorder.spans] == ["stage"] * 3
    assert [finished(span) for span in (computed, abandoned, failed)] == ["finished", "cancelled", "failed"]
    assert [span.status.status_code for span in (computed, abandoned)] == [StatusCode.UNSET] * 2
    assert failed.status.description == "request r is not open on stage 0"
    assert recorder.seconds(computed) == pytest.approx(report.wall, abs=2e-9)
    about = {f"deltafront.seconds.{phase}": seconds for phase, seconds in report.phases.items()}
    told = {"finish": "finished", "stage": 0, "handoff_bytes": report.handoff_bytes}
    assert computed.attributes == about | {f"deltafront.{name}": value for name, value in told.items()}
