"""Tests a decode worker's end of the KV hand-off: ignored messages, failed requests, and errors to the
sender."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deltafront.workers.decode.request import RequestTimes
from deltafront.workers.messages.events import FinishReason
from deltafront.workers.messages.requests import (
    GenerateJob,
    KeepSession,
    RefusalReason,
    Refused,
    Sampling,
)
from deltafront.workers.messages.stages import FirstLogits, HandoffFailed

from ..prompts import SHORT, Clock, ids_of


async def test_ignores_repeated_and_unknown_kv_announcements(bench: Any) -> None:
    run = await bench()
    ids = ids_of(70)
    alone = await run.ask("alone", ids, SHORT)
    await run.reserve("a", 70, 8)
    prompt = run.prefill(ids)
    pieces = run.pieces("a", prompt)
    for piece in [*pieces, *pieces, replace(pieces[0], request_id="nobody")]:
        await run.engine.announce(piece)
    for message in ("a", "a", "nobody"):
        await run.engine.first_logits(FirstLogits(request_id=message, logits=prompt.logits))
    answer = await run.collect(GenerateJob(request_id="a", sampling=SHORT))
    assert answer.ids == alone.ids
    assert answer.finish.report.handoff_bytes == alone.finish.report.handoff_bytes


async def test_counts_a_layers_kv_once_if_it_is_announced_twice(bench: Any) -> None:
    """One message has all layers of a chunk. Another has announced one of the layers before."""
    run = await bench()
    ids = ids_of(70)
    alone = await run.ask("alone", ids, SHORT)
    await run.reserve("a", 70, 8)
    prompt = run.prefill(ids)
    layers = len(prompt.kv)
    pieces = run.pieces("a", prompt)
    await run.engine.announce(pieces[2])
    for first in range(0, len(pieces), layers):
        chunk = pieces[first : first + layers]
        payload = tuple(x for piece in chunk for x in piece.payload)
        await run.engine.announce(replace(chunk[0], payload=payload, layers=layers))
    await run.engine.first_logits(FirstLogits(request_id="a", logits=prompt.logits))
    answer = await run.collect(GenerateJob(request_id="a", sampling=SHORT))
    assert answer.ids == alone.ids
    assert answer.finish.report.handoff_bytes == alone.finish.report.handoff_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer": 6}, "layer 6"),
        ({"start": 64}, "64 .. 95"),
        ({"start": 5}, "overlaps"),
        ({"payload": None}, "not 2 arrays"),
        ({"payload": (np.zeros((31, 2, 16), np.float32),) * 2}, "not float32"),
        ({"payload": (np.zeros((32, 2, 16), np.float16),) * 2}, "not float32"),
    ],
)
async def test_bad_kv_announcement_fails_its_request_and_tells_the_stage(
    bench: Any, change: dict[str, Any], words: str
) -> None:
    run = await bench()
    await run.reserve("a", 70, 8)
    good, bad = run.pieces("a", run.prefill(ids_of(70)))[:: 6 if "layer" not in change else 1][:2]
    await run.engine.announce(good)
    with pytest.raises(Exception, match=words):
        await run.engine.announce(replace(bad, **change))
    assert run.used == 5, "its door may have another group go on"
    answer = await run.collect(GenerateJob(request_id="a", sampling=SHORT))
    assert answer.finish.reason is FinishReason.NO_KV and words in answer.finish.message
    assert run.used == 0
    await run.reserve("a", 70, 8)  # the id can be used again
    await run.engine.cancel("a")


async def test_failed_kv_transfer_fails_keeping_a_session(bench: Any) -> None:
    run = await bench()
    await run.reserve("a", 70, 0)
    keeping = asyncio.create_task(run.engine.keep(KeepSession(request_id="a")))
    piece = run.pieces("a", run.prefill(ids_of(70)))[0]
    with pytest.raises(Exception, match="not 2 arrays"):
        await run.engine.announce(replace(piece, payload="lost"))
    with pytest.raises(HandoffFailed, match="did not arrive"):
        await keeping


async def test_session_refuses_ids_of_another_length_and_cancel_frees_pages(bench: Any) -> None:
    run = await bench()
    await run.reserve("a", 70, 0)
    await run.deliver("a", ids_of(70))
    with pytest.raises(ValueError, match="the ids of 69 tokens came with a prompt of 70"):
        await run.engine.keep(KeepSession(request_id="a", prompt_ids=np.zeros(69, "<u4").tobytes()))
    await run.engine.cancel("a")
    assert run.used == 0


async def test_session_refuses_unknown_requests_and_passed_deadlines(bench: Any) -> None:
    clock = Clock()
    run = await bench(wall=clock)
    unknown = await run.engine.keep(KeepSession(request_id="nobody"))
    assert isinstance(unknown, Refused) and unknown.reason is RefusalReason.NO_SESSION
    await run.reserve("a", 70, 0, deadline=1001.0)
    keeping = asyncio.create_task(run.engine.keep(KeepSession(request_id="a")))
    await asyncio.sleep(0.05)
    clock.now = 1001.0
    late = await keeping
    assert isinstance(late, Refused) and late.reason is RefusalReason.DEADLINE
    assert run.used == 0


async def test_logits_of_a_wrong_size_or_with_nan_fail_the_request(bench: Any) -> None:
    run = await bench()
    await run.reserve("a", 70, 8)
    with pytest.raises(Exception, match="vocabulary"):
        await run.engine.first_logits(FirstLogits(request_id="a", logits=np.zeros(5, np.float32)))
    await run.reserve("b", 70, 8)
    prompt = run.prefill(ids_of(70))
    for piece in run.pieces("b", prompt):
        await run.engine.announce(piece)
    await run.engine.first_logits(FirstLogits(request_id="b", logits=prompt.logits * np.nan))
    answer = await run.collect(GenerateJob(request_id="b", sampling=SHORT))
    assert answer.finish.reason is FinishReason.FAILED and "not finite" in answer.finish.message


async def test_requests_of_a_batch_share_each_decode_step(bench: Any) -> None:
    """The requests' shares of steps (`own_steps`) add up to the number of steps."""
    run = await bench()
    runner, batches = run.engine._runner, []
    launch = runner.launch

    def counted(rows: Any, masks: Any = ()) -> Any:
        batches.append(len(rows))
        return launch(rows, masks)

    runner.launch = counted
    lengths = (8, 5, 3)
    jobs = (
        run.ask(f"r{tokens}", ids_of(40 + tokens), Sampling(max_tokens=tokens, ignore_eos=True))
        for tokens in lengths
    )
    reports = [answer.finish.report for answer in await asyncio.gather(*jobs)]
    assert [report.steps for report in reports] == [tokens - 1 for tokens in lengths]
    assert sum(report.steps for report in reports) == sum(batches)
    assert sum(report.own_steps for report in reports) == pytest.approx(len(batches))


def test_overlapping_kv_transfers_count_their_time_once() -> None:
    now, times = [0.0], RequestTimes()

    def clock() -> float:
        return now[0]

    with times.receiving_kv(clock):
        now[0] = 1.0
        with times.receiving_kv(clock):
            now[0] = 3.0
    now[0] = 10.0
    with pytest.raises(OSError), times.receiving_kv(clock):
        now[0] = 10.5
        raise OSError
    assert times.handoff_seconds == 3.5
