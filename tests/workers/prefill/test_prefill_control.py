"""Tests the prefill controller with fake stages: order, chunks in flight, pages and cancellations."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace

import pytest

from deltafront.kernels.methods import method_spec
from deltafront.workers.messages.events import LayerDensity, PrefillDone
from deltafront.workers.messages.requests import (
    PrefillFailed,
    PrefillJob,
    RefusalReason,
    Refused,
)
from deltafront.workers.messages.stages import (
    ChunkCommand,
    ChunkReport,
    RequestFailed,
)
from deltafront.workers.prefill.group import schedule
from deltafront.workers.prefill.group.chunks import ModelWork, StageWork, plan_chunks
from deltafront.workers.prefill.group.controller import PrefillController
from deltafront.workers.settings import PrefillConfig

from ..timeless import timeless
from .fake_stages import (
    DENSE,
    FakeStage,
    assert_clean,
    collect,
    controller_of,
    job,
    make,
    no_pulse,
    no_trouble,
)


@timeless
async def test_prefill_reports_each_chunk_and_then_a_summary() -> None:
    controller, fakes = make()
    events = await collect(controller, job("a", 300))
    assert [(event.tokens_done, event.tokens_total) for event in events[:3]] == [
        (128, 300),
        (256, 300),
        (300, 300),
    ]
    report = events[3].report
    assert events[2].so_far == report and events[0].so_far.handoff_bytes < report.handoff_bytes
    assert len(events) == 4 and isinstance(events[3], PrefillDone)
    assert sum(report.critical.values()) == pytest.approx(report.wall, abs=1e-12)
    assert report.critical["projection"] == pytest.approx(3 * 0.0004)
    assert report.critical["other_requests"] == 0.0
    assert [s["projection"] for s in report.stages] == pytest.approx([0.0012, 0.0012])
    assert report.density == tuple(
        LayerDensity(layer=layer, computed=3.0, causal=6.0, attention=1.5, choosing=0.75) for layer in (0, 1)
    )
    assert (report.method, report.sampled_share, report.handoff_bytes) == ("dense", 0.25, 600)
    assert fakes[0].log[:5] == [
        ("open", "a", 0),
        ("chunk", "a", 0),
        ("chunk", "a", 128),
        ("chunk", "a", 256),
        ("close", "a", 0),
    ]
    assert (await controller.stats()).tokens_per_second > 0
    await assert_clean(controller, fakes)


@timeless
async def test_chunks_in_flight_are_bounded_and_short_prompts_go_first() -> None:
    """The first stage has one chunk running and one queued. In all, there is one chunk more than stages."""
    controller, fakes = make(stages=3)
    long = asyncio.create_task(collect(controller, job("long", 900)))
    await asyncio.sleep(0)
    assert [kind for kind, _, _ in fakes[0].log].count("chunk") == 2, "the next waits for the first stage"
    await collect(controller, job("short", 100))
    assert not long.done(), "128-token chunks of the long prompt are still to come"
    events = await long
    report = events[-1].report
    assert report.critical["other_requests"] == pytest.approx(0.0006)
    assert sum(report.critical.values()) == pytest.approx(report.wall, abs=1e-12)
    await assert_clean(controller, fakes)


@timeless
async def test_cuts_prompts_as_planned_if_chunk_costs_are_known() -> None:
    config = PrefillConfig(stages=3, chunk_tokens=4096, cache_tokens=65_536)
    fakes = [FakeStage(stage, lambda: 0.001, no_trouble) for stage in range(3)]
    layers = (11, 11, 10)
    work = ModelWork(tuple(StageWork(n * 218_103_808, n * 8192, 2 * n) for n in layers))
    controller = controller_of(fakes, config, work)
    await asyncio.gather(collect(controller, job("a", 30_000)), collect(controller, job("b", 9_000)))
    for name, tokens in (("a", 30_000), ("b", 9_000)):
        starts = [start for kind, one, start in fakes[0].log if (kind, one) == ("chunk", name)]
        sizes = plan_chunks(0, tokens, 4096, work.chunk_cost(DENSE))
        assert starts == [0, *itertools.accumulate(sizes[:-1])] and len(set(sizes)) > 1
    await assert_clean(controller, fakes)


@timeless
async def test_request_gains_priority_only_while_none_of_its_chunks_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both prompts have the same length. The overtaken one has earned its turn."""
    monkeypatch.setattr(schedule, "ageing_of", lambda _rate: 1e6)
    config = PrefillConfig(stages=1, chunk_tokens=128, cache_tokens=4096)
    fake = FakeStage(0, lambda: 0.002, no_trouble)
    controller = controller_of([fake], config)
    await asyncio.gather(collect(controller, job("a", 512)), collect(controller, job("b", 512)))
    turns = "".join(name for kind, name, _ in fake.log if kind == "chunk")
    assert turns == "aabbaabb", "as many at a time as may be launched at once"


@timeless
async def test_refused_prompts_take_no_pages() -> None:
    controller, fakes = make(pages=64)
    running = controller.prefill(job("a", 900))
    await anext(running)
    refused = {
        RefusalReason.TOO_LARGE: job("b", 2000),
        RefusalReason.DUPLICATE: job("a", 16),
        RefusalReason.DEADLINE: job("d", 16, deadline=time.time() - 1),
    }
    for reason, work in refused.items():
        (event,) = await collect(controller, work)
        assert isinstance(event, Refused) and event.reason is reason
    assert (await controller.stats()).pages_free == 64 - 57
    for bad in (
        PrefillJob(request_id="e", token_ids=b"123", method=DENSE, decode_worker="decode:x"),
        job("f", 0),
    ):
        with pytest.raises(PrefillFailed, match="not a prompt"):
            await collect(controller, bad)
    await running.aclose()
    await assert_clean(controller, fakes)


@pytest.mark.parametrize("chunk_tokens", [0, 64, 200])
def test_refuses_chunk_sizes_that_are_no_multiple_of_a_tile(chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        PrefillController("x", [], PrefillConfig(chunk_tokens=chunk_tokens), lambda _: None, no_pulse)


@timeless
async def test_group_frees_pages_only_after_decode_workers_copied_them() -> None:
    """Until then the controller asks the stages again and again, and other requests continue."""
    controller, fakes = make(stages=2, pages=64)
    fakes[1].lent["a"] = 5
    await collect(controller, job("a", 300))
    closes = [fake.log.count(("close", "a", 0)) for fake in fakes]
    assert closes == [6, 6], "asked again until every stage gives them back"
    fakes[0].lent["b"] = 10**9
    reading = asyncio.create_task(collect(controller, job("b", 300)))
    await collect(controller, job("c", 600))
    assert (await controller.stats()).pages_free == 64 - 19 and not reading.done()
    fakes[0].lent["b"] = 0
    await reading
    await assert_clean(controller, fakes)


@timeless
async def test_group_frees_pages_only_after_every_stage_closed_the_request() -> None:
    controller, fakes = make(pages=8)
    stream = controller.prefill(job("a", 128))
    await anext(stream)
    fakes[1].pause = lambda: 0.05
    closing = asyncio.create_task(controller.cancel("a"))
    await asyncio.sleep(0.02)
    assert (await controller.stats()).pages_free == 0, "stage 1 has not confirmed"
    behind = asyncio.create_task(collect(controller, job("b", 128)))
    await asyncio.sleep(0.02)
    assert (await controller.stats()).waiting == 1 and not behind.done()
    await closing
    assert isinstance((await behind)[-1], PrefillDone)
    await stream.aclose()
    await assert_clean(controller, fakes)


@timeless
async def test_cancel_abandons_only_the_requests_chunks_in_flight() -> None:
    controller, fakes = make(pause=lambda: 0.02)
    stream = controller.prefill(job("a", 1000))
    await anext(stream)
    await stream.aclose()
    await collect(controller, job("a", 200))
    for fake in fakes:
        first = ("abandon", "", fake.serials[0])
        assert [entry for entry in fake.log if entry[0] == "abandon"] == [first], "of that id, once"
        assert fake.log.index(first) < fake.log.index(("close", "a", 0))
    await assert_clean(controller, fakes)


class HeldStage(FakeStage):
    """Answers a chunk when the test says so."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage, lambda: 0.0, no_trouble)
        self.held: list[tuple[Sequence[ChunkCommand], asyncio.Future[list[ChunkReport | RequestFailed]]]] = []

    def run_batch(self, commands: Sequence[ChunkCommand]) -> Awaitable[list[ChunkReport | RequestFailed]]:
        self.held.append((commands, asyncio.get_running_loop().create_future()))
        return self.held[-1][1]

    def answer(self, chunk: int) -> None:
        commands, owed = self.held[chunk]
        owed.set_result([self._chunk(command) for command in commands])


async def test_chunks_finish_in_the_order_in_which_they_were_sent() -> None:
    """Even if the later chunk's answer reaches the event loop first."""
    fakes = [HeldStage(0), HeldStage(1)]
    config = PrefillConfig(stages=2, chunk_tokens=128, cache_tokens=1024)
    controller = controller_of(list(fakes), config)
    events = asyncio.ensure_future(collect(controller, job("a", 256)))
    while not fakes[1].held:
        await asyncio.sleep(0)
    fakes[0].answer(0)
    while len(fakes[1].held) < 2:
        await asyncio.sleep(0)
    fakes[0].answer(1)
    fakes[1].answer(1)
    for _ in range(5):
        await asyncio.sleep(0)
    fakes[1].answer(0)
    done = await events
    assert [(event.tokens_done, event.tokens_total) for event in done[:2]] == [(128, 256), (256, 256)]
    assert isinstance(done[2], PrefillDone) and len(done) == 3
    assert sum(layer.causal for layer in done[2].report.density) == 2 * 2 * 2.0, (
        "both chunks are in the report"
    )


async def batches_of(
    prompts: Sequence[PrefillJob], batch_tokens: int = 512, pages: int = 256
) -> list[list[str]]:
    """Prefill prompts that arrive while a long one runs. Return the batches after those of the long one."""
    config = PrefillConfig(stages=2, chunk_tokens=512, cache_tokens=16 * pages)
    fakes = [FakeStage(stage, lambda: 0.01, no_trouble) for stage in range(2)]
    work = ModelWork((StageWork(1, 0, 2),) * 2, batch_tokens=batch_tokens)
    controller = controller_of(fakes, config, work)
    running = [asyncio.create_task(collect(controller, job("long", 1536)))]
    await asyncio.sleep(0)
    running += [asyncio.create_task(collect(controller, prompt)) for prompt in prompts]
    for events in await asyncio.gather(*running):
        assert isinstance(events[-1], PrefillDone)
        report = events[-1].report
        assert sum(report.critical.values()) == pytest.approx(report.wall, abs=1e-12)
    assert fakes[0].batches == fakes[1].batches
    await assert_clean(controller, fakes)
    return [batch for batch in fakes[0].batches if batch != ["long"]]


@timeless
async def test_short_prompts_share_a_batch_in_the_order_of_the_queue() -> None:
    prompts = [job("a", 100), job("b", 300), job("c", 90), job("d", 200), job("e", 500)]
    assert await batches_of(prompts) == [["c", "a", "d"], ["b"], ["e"]]
    assert await batches_of(prompts, batch_tokens=0) == [["c"], ["a"], ["d"], ["b"], ["e"]]


@timeless
async def test_prompt_of_another_method_or_without_pages_joins_no_batch() -> None:
    other = replace(job("b", 110), method=method_spec("streaming"))
    assert await batches_of([job("a", 100), other, job("c", 120)]) == [["a"], ["b"], ["c"]]
    pages = 96 + 7 + 8  # of the long prompt, and of a and c
    assert await batches_of([job("a", 100), job("b", 400), job("c", 120)], 640, pages) == [["a", "c"], ["b"]]


@timeless
async def test_prompt_that_fails_leaves_the_others_of_its_batch_alone() -> None:
    def trouble(request_id: str) -> None:
        if request_id == "bad":
            raise RequestFailed("it overflowed")

    config = PrefillConfig(stages=2, chunk_tokens=512, cache_tokens=4096)
    fakes = [FakeStage(stage, lambda: 0.01, trouble) for stage in range(2)]
    controller = controller_of(fakes, config, ModelWork((StageWork(1, 0, 2),) * 2, batch_tokens=512))
    names = ("before", "a", "bad", "b")
    running = [asyncio.create_task(collect(controller, job(name, 100))) for name in names]
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert [isinstance(events, list) and isinstance(events[-1], PrefillDone) for events in outcomes] == [
        name != "bad" for name in names
    ]
    assert isinstance(outcomes[2], PrefillFailed) and str(outcomes[2]) == "it overflowed"
    assert any({"bad", "b"} <= {*batch} for batch in fakes[0].batches)
    await assert_clean(controller, fakes)
