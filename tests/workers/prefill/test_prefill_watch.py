"""Tests that stages that hang are noticed in time and named, and that slow stages are not confused with
them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from deltafront.workers.messages.events import ChunkRead, PrefillDone
from deltafront.workers.messages.requests import PrefillFailed
from deltafront.workers.messages.stages import ChunkReport
from deltafront.workers.prefill.group.account import Pace
from deltafront.workers.prefill.group.controller import PrefillController
from deltafront.workers.prefill.group.watch import PULSE_S, StageWatch
from deltafront.workers.settings import PrefillConfig

from ..timeless import timeless
from .fake_stages import FakeStage, assert_clean, controller_of, job, no_trouble


class SlowStage(FakeStage):
    """A stage whose reports say how long its chunks took."""

    def _chunk(self, command: Any) -> ChunkReport:
        report = super()._chunk(command)
        return ChunkReport(**{**vars(report), "wall": self.pause(), "phases": {}})


def slow(stages: int, seconds: float, **config: Any) -> tuple[PrefillController, list[FakeStage]]:
    """Run chunks of 128 tokens that take these seconds on each stage."""
    fakes: list[FakeStage] = [SlowStage(n, lambda: seconds, no_trouble) for n in range(stages)]
    chosen = PrefillConfig(stages=stages, chunk_tokens=128, cache_tokens=4096, **config)
    return controller_of(fakes, chosen), fakes


@pytest.mark.parametrize("stuck", [0, 1, 2])
@pytest.mark.parametrize("chunk_s", [0.05, 4.0])
@timeless
async def test_hung_stage_is_noticed_within_two_chunk_times_and_5_s(stuck: int, chunk_s: float) -> None:
    """The error names the stage that hangs, although later stages wait just as long."""
    controller, fakes = slow(3, chunk_s, stream_lease_s=1e6)
    stream, now = controller.prefill(job("a", 2048)), asyncio.get_running_loop().time
    while not (isinstance(event := await anext(stream), ChunkRead) and event.tokens_done == 512):
        pass
    fakes[stuck].stuck, began = True, now()
    with pytest.raises(PrefillFailed, match=f"is lost: stage {stuck} does not answer: the chunk of a at"):
        async for _ in stream:
            pass
    in_pipeline = 2 * chunk_s  # until the last stage has finished earlier chunks
    assert now() - began <= 2 * chunk_s + 5.0 + in_pipeline
    assert all(fake.stopped for fake in fakes)
    assert f"stage {stuck} does not answer" in await controller.check()


@pytest.mark.parametrize("stuck", [0, 1, 2])
@timeless
async def test_stage_hung_in_the_very_first_chunk_is_noticed_within_5_s(stuck: int) -> None:
    """No chunk's time has been measured yet."""
    controller, fakes = slow(3, 4.0, stream_lease_s=1e6)
    stream, now = controller.prefill(job("a", 2048)), asyncio.get_running_loop().time
    fakes[stuck].stuck, began = True, now()
    with pytest.raises(PrefillFailed, match=f"is lost: stage {stuck} does not answer"):
        async for _ in stream:
            pass
    before = stuck * 4.0 + 4.0  # for earlier stages and the request's `open`
    assert now() - began <= before + 5.0


@pytest.mark.parametrize("alive_s", [0.5, 30.0, 31.4, 100.0])
@timeless
async def test_notices_a_stage_that_hangs_after_answering_a_check(alive_s: float) -> None:
    """For example, it compiles and then hangs."""
    controller, fakes = slow(2, 0.5, stream_lease_s=1e6)
    stream, loop = controller.prefill(job("a", 512)), asyncio.get_running_loop()
    fakes[1].pause = lambda: 1e5

    def hang() -> None:
        fakes[1].stuck = True

    loop.call_later(alive_s, hang)
    with pytest.raises(PrefillFailed, match="is lost: stage 1 does not answer: opening a has taken"):
        async for _ in stream:
            pass
    assert alive_s < loop.time() <= max(alive_s, 0.5) + 5.0


@timeless
async def test_stage_that_answers_checks_in_a_slow_chunk_is_not_hung() -> None:
    """First a compiler, then a decode worker makes the chunk slow."""
    controller, fakes = slow(2, 200.0, stream_lease_s=1e6)
    stream = controller.prefill(job("a", 384))
    await anext(stream)
    for fake in fakes:
        fake.pause = lambda: 0.1
    assert isinstance([event async for event in stream][-1], PrefillDone)
    stream = controller.prefill(job("b", 384))
    await anext(stream)
    fakes[1].pause = lambda: 250.0
    assert isinstance([event async for event in stream][-1], PrefillDone)
    await assert_clean(controller, fakes)


@timeless
async def test_live_stage_without_progress_is_finally_declared_lost() -> None:
    controller, fakes = slow(2, 0.1, stream_lease_s=1e6, stall_s=100.0)
    stream, now = controller.prefill(job("a", 512)), asyncio.get_running_loop().time
    await anext(stream)
    fakes[1].pause, began = lambda: 1e5, now()
    with pytest.raises(PrefillFailed, match=r"stage 1 has not finished: the chunk of a at .* has taken 100"):
        async for _ in stream:
            pass
    assert 100.0 <= now() - began <= 102.0


@timeless
async def test_notices_a_stage_that_hangs_while_idle_or_closing() -> None:
    controller, fakes = slow(2, 0.1)
    fakes[1].stuck = True
    assert "stage 1 does not answer: counting its pages" in await controller.check()
    controller, fakes = slow(2, 0.1)
    stream = controller.prefill(job("a", 384))
    await anext(stream)
    closing = asyncio.ensure_future(controller.cancel("a"))
    await asyncio.sleep(0.15)
    fakes[0].stuck = True
    await closing
    assert "stage 0 does not answer" in controller.failure
    await stream.aclose()


async def stood_still_after(
    seconds: float, pulse: Callable[[int], Awaitable[None]], allowed: float, stall_s: float
) -> tuple[StageWatch, asyncio.Future[None], list[str]]:
    """Return a watch whose process was paused for a minute until a second ago, the answer that it waits for,
    and the stages that it blames."""
    loop, lost, skipped = asyncio.get_running_loop(), list[str](), [0.0]
    watch = StageWatch(1, pulse, lambda _, what: lost.append(what), lambda: loop.time() + skipped[0], stall_s)
    answer: asyncio.Future[None] = loop.create_future()
    watch.expect(0, "a chunk", lambda: allowed, answer)
    await asyncio.sleep(seconds)
    skipped[0] = 60.0
    await asyncio.sleep(1.0)
    return watch, answer, lost


@timeless
async def test_controller_that_was_suspended_does_not_blame_the_stages() -> None:
    """The controller's process is paused for a minute: its clock jumps, and answers arrive late."""
    asked = list[int]()

    async def pulse(stage: int) -> None:
        asked.append(stage)

    _, answer, lost = await stood_still_after(1.0, pulse, allowed=3.0, stall_s=50.0)
    assert not asked and not lost
    await asyncio.sleep(PULSE_S)
    assert asked and not lost
    answer.set_result(None)
    asked.clear()
    await asyncio.sleep(100.0)
    assert not asked and not lost


@timeless
async def test_controller_suspended_during_a_stage_check_blames_no_stage() -> None:
    alive = asyncio.Event()

    async def pulse(_stage: int) -> None:
        await alive.wait()

    watch, _, lost = await stood_still_after(2.0, pulse, allowed=1.0, stall_s=500.0)
    alive.set()
    await asyncio.sleep(100.0)
    assert not lost
    await watch.stop()


@timeless
async def test_stopped_watch_leaves_no_task_or_timer() -> None:
    async def pulse(_stage: int) -> None:
        await asyncio.sleep(1e6)

    watch = StageWatch(1, pulse, lambda _, what: None, asyncio.get_running_loop().time, 500.0)
    watch.expect(0, "a chunk", lambda: 1.0, asyncio.get_running_loop().create_future())
    await asyncio.sleep(2.0)
    assert len(asyncio.all_tasks()) == 2
    await watch.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(10.0)
    assert asyncio.get_running_loop().time() - began == 10.0
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_expected_chunk_time_follows_the_previous_chunk() -> None:
    def reports(*walls: float) -> list[ChunkReport]:
        waits = {"activation_wait": 5.0}
        return [
            ChunkReport(
                request_id="a",
                stage=n,
                start=0,
                wall=wall + 5.0,
                phases=waits,
                density=(),
                sampled_share=0,
                handoff_bytes=0,
            )
            for n, wall in enumerate(walls)
        ]

    pace = Pace(slack_s=3.0)
    assert pace.allowed("dense", [(None, 128)]) == 3.0
    first = pace.record_chunk("dense", 0, 128, reports(1.28, 2.56))
    assert first == pytest.approx(0.02)
    assert pace.allowed("dense", [(first, 64)]) == pytest.approx(3.0 + 2 * 0.02 * 64)
    later = pace.record_chunk("dense", 128, 128, reports(3.84, 2.56))
    assert pace.allowed("dense", [(later, 128)]) == pytest.approx(3.0 + 2 * 3.84)
    both = pace.allowed("dense", [(first, 64), (later, 128)])
    assert both == pytest.approx(3.0 + 2 * (0.02 * 64 + 3.84)), "a batch of two prompts"
    assert pace.allowed("dense", [(None, 128)]) == pytest.approx(3.0 + 2 * 2.56), "another prompt's first"
    assert pace.allowed("dpxa", [(None, 128)]) == 3.0
