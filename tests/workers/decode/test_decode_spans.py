"""Tests a decode worker's trace spans."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from deltafront.workers.messages.requests import GenerateJob, KeepSession, Sampling

from ..prompts import ids_of
from ..spans import PARENT, Recorder

SHORT = Sampling(max_tokens=3, ignore_eos=True)
PARTS = ("handoff_exposed", "decode_wait", "append_prefill", "first_step")


async def test_answer_span_holds_the_latency_parts_of_its_report(bench: Any) -> None:
    """The test also asks a question on a session. A request without tracing has no span."""
    recorder = Recorder()
    run = await bench(tracer=recorder.tracer)
    first = await run.ask("a", ids_of(70), SHORT, keep_tokens=70, keep_ttl_s=60.0, trace=PARENT)
    await run.ask("b", ids_of(30), SHORT)
    session = first.first.session.session_id
    second = await run.ask_session("c", session, ids_of(5), SHORT, trace=PARENT)
    roots = recorder.under(None)
    assert [root.name for root in roots] == ["decode", "decode"]
    for root, answer in zip(roots, (first, second), strict=True):
        message = {part: seconds for part, seconds in asdict(answer.finish.report).items() if part in PARTS}
        shown = {span.name: recorder.seconds(span) for span in recorder.under(root)}
        assert shown == pytest.approx({part: s for part, s in message.items() if s}, abs=2e-9)
        assert root.attributes is not None and root.attributes["deltafront.finish"] == "length"
        assert root.attributes["deltafront.tokens"] == 3
        assert root.attributes["deltafront.handoff_bytes"] == answer.finish.report.handoff_bytes
    assert "append_prefill" in {span.name for span in recorder.under(roots[1])}
    assert recorder.begun == len(recorder.spans)
    await run.engine.release_session(session, "me")


async def test_span_ends_however_its_request_ends(bench: Any) -> None:
    recorder = Recorder()
    run = await bench(tracer=recorder.tracer)

    await run.reserve("kept", 70, 0, keep_ttl_s=60.0, trace=PARENT)
    await run.deliver("kept", ids_of(70))
    kept = await run.engine.keep(KeepSession(request_id="kept"))
    await run.engine.release_session(kept.session.session_id, "me")

    await run.reserve("left", 70, 3, trace=PARENT)
    stream = run.engine.generate(GenerateJob(request_id="left", sampling=SHORT))
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await stream.aclose()

    await run.reserve("wrong", 70, 3, trace=PARENT)
    await run.collect(GenerateJob(request_id="wrong", sampling=SHORT, keep_tokens=71))

    await run.reserve("late", 70, 3, deadline=1.0, trace=PARENT)
    await run.collect(GenerateJob(request_id="late", sampling=SHORT))

    ended = [(s.name, (s.attributes or {})["deltafront.finish"]) for s in recorder.under(None)]
    assert ended == [("keep", "stop"), ("decode", "cancelled"), ("decode", "failed"), ("decode", "deadline")]
    statuses = [span.status.status_code for span in recorder.under(None)]
    assert statuses == [StatusCode.UNSET, StatusCode.UNSET, StatusCode.ERROR, StatusCode.UNSET]
    assert recorder.begun == len(recorder.spans), "one that began has not ended"
