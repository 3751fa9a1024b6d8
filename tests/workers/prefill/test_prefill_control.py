"""The prefill controller over fake stages: order, endings at random moments, pages, deadlines, leases."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from deltafront.workers import waits
from deltafront.workers.messages.events import ChunkRead, LayerDensity, PrefillDone
from deltafront.workers.messages.requests import (
    PrefillCancelled,
    PrefillFailed,
    PrefillJob,
    RefusalReason,
    Refused,
)
from deltafront.workers.messages.stages import (
    ChunkCommand,
    ChunkReport,
    HandoffFailed,
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
async def test_prompt_yields_its_chunks_and_then_a_report() -> None:
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
async def test_chunks_in_flight_are_bounded_and_short_prompts_overtake() -> None:
    """The first stage has one chunk running and one queued; in all there is one more than stages."""
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
async def test_prompts_are_cut_as_planned_if_chunk_costs_are_known() -> None:
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
async def test_a_request_ages_only_while_nothing_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both prompts have one length; the overtaken one has earned its turn."""
    monkeypatch.setattr(schedule, "AGEING", 1e6)
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
def test_chunks_are_whole_tiles(chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        PrefillController("x", [], PrefillConfig(chunk_tokens=chunk_tokens), lambda _: None, no_pulse)


@timeless
async def test_pages_are_free_only_when_no_decode_worker_reads_them() -> None:
    """Stages are polled until then, and other requests continue meanwhile."""
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
async def test_lost_group_stops_polling_stages_for_free_pages() -> None:
    """Also if it is lost between two polls: no answer would come from a dead stage."""
    controller, fakes = make()
    fakes[0].lent["a"] = 10**9
    reading = asyncio.create_task(collect(controller, job("a", 128)))
    while not (fakes[0].lent["a"] < 10**9 - 3 and all(one.done() for fake in fakes for one in fake._owed)):
        await asyncio.sleep(0.0001)
    await asyncio.sleep(0.001)  # the answers have been heard, and it pauses
    asked = fakes[0].log.count(("close", "a", 0))
    controller._fail(RuntimeError("stage 1 died"))
    await reading
    await controller.stop()
    assert fakes[0].log.count(("close", "a", 0)) == asked


@timeless
async def test_stopping_group_logs_the_calls_its_stages_owe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "SLOW_S", 0.01)
    controller, fakes = make()
    monkeypatch.setattr(controller, "_end_stages", lambda _hanging: None)
    fakes[1].stuck = True
    reading = asyncio.create_task(collect(controller, job("a", 128)))
    await asyncio.sleep(0.1)
    stopping = asyncio.create_task(controller.stop())
    await asyncio.sleep(0)
    said_so(caplog)
    fakes[1].stop()
    await asyncio.gather(reading, stopping, return_exceptions=True)
    lines = [record.getMessage() for record in caplog.records if record.name == waits.__name__]
    assert lines[0].endswith(
        "waits for answers that stages owe: opening a (stage 1); the chunk of a at token 0 (stage 1)"
    )


def said_so(caplog: pytest.LogCaptureFixture) -> None:
    deadline = time.monotonic() + 60.0
    while not caplog.records:
        assert time.monotonic() < deadline, "nothing was said"
        time.sleep(0.005)


@timeless
async def test_pages_are_free_only_when_every_stage_has_closed() -> None:
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
async def test_a_cancel_abandons_chunks_in_flight_and_only_those() -> None:
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


@timeless
async def test_deadline_and_lease_end_a_request() -> None:
    controller, fakes = make(pause=lambda: 0.01, lease=0.06)
    events = await collect(controller, job("late", 1000, deadline=time.time() + 0.03))
    assert isinstance(events[-1], Refused) and events[-1].reason is RefusalReason.DEADLINE
    with pytest.raises(PrefillCancelled, match="no door has renewed"):
        await collect(controller, job("lost", 1000))
    renewing = asyncio.create_task(collect(controller, job("kept", 1000)))
    while not renewing.done():
        await asyncio.sleep(0.02)
        await controller.renew(["kept", "unknown"])
    assert isinstance((await renewing)[-1], PrefillDone)
    await assert_clean(controller, fakes)


@timeless
async def test_lease_is_checked_again_before_it_ends_a_request() -> None:
    """Renewals that queued while the process was suspended then count."""
    controller, fakes = make(pages=320, pause=lambda: 0.5, lease=5.0)
    reading = asyncio.create_task(collect(controller, job("a", 128 * 40)))
    await asyncio.sleep(5.25)
    await controller.renew(["a"])
    await asyncio.sleep(5.25)
    assert not reading.done()
    with pytest.raises(PrefillCancelled, match="for 5 s"):
        await reading
    await assert_clean(controller, fakes)


@timeless
@pytest.mark.parametrize(("raised", "told"), [(RequestFailed, PrefillFailed), (HandoffFailed, HandoffFailed)])
async def test_failed_request_leaves_the_others_running(
    raised: type[RequestFailed], told: type[PrefillFailed]
) -> None:
    def trouble(request_id: str) -> None:
        if request_id == "bad":
            raise raised("its method does not run here")

    controller, fakes = make(trouble=trouble)
    good, bad = await asyncio.gather(
        collect(controller, job("good", 500)), collect(controller, job("bad", 300)), return_exceptions=True
    )
    assert isinstance(good, list) and isinstance(good[-1], PrefillDone)
    assert type(bad) is told and str(bad) == "its method does not run here"
    assert controller.failure == ""
    await assert_clean(controller, fakes)


@timeless
async def test_a_dead_stage_ends_everything_with_one_plain_message() -> None:
    controller, fakes = make(pause=lambda: 0.003)
    jobs = [asyncio.create_task(collect(controller, job(name, 300))) for name in "abc"]
    closing = asyncio.create_task(controller.cancel("a"))
    await asyncio.sleep(0.005)
    fakes[1].stop()
    outcomes = await asyncio.gather(*jobs, closing, return_exceptions=True)
    message = "prefill group prefill:test is lost: stage 1 died"
    assert [str(error) for error in outcomes[:3]].count(message) >= 2
    assert all(isinstance(error, PrefillFailed) for error in outcomes[:3])
    assert outcomes[3] is None
    assert fakes[0].stopped and controller.failure == message
    assert "abandon" in [kind for kind, _, _ in fakes[0].log], "what still runs ends soon"
    assert controller._requests._pool.used == 0
    for late in (collect(controller, job("d", 16)), controller.stats()):
        with pytest.raises(PrefillFailed, match="is lost"):
            await late
    assert await controller.check() == message


@timeless
async def test_stopping_waits_for_the_calls_its_stages_owe() -> None:
    """Otherwise a task would be left in an event loop that is about to end."""

    def trouble(_request_id: str) -> None:
        raise RuntimeError("stage 1 died")

    controller, fakes = make(trouble=trouble)
    fakes[0].pause = lambda: 5.0
    fakes[0].stop = lambda: None  # type: ignore[method-assign]
    with pytest.raises(PrefillFailed, match="stage 1 died"):
        await collect(controller, job("a", 128))
    await controller.stop()
    others = {asyncio.current_task(), *fakes[0]._tasks, *fakes[1]._tasks}
    assert asyncio.all_tasks() - others == set()


@timeless
async def test_check_notices_a_stage_that_died_while_idle() -> None:
    controller, fakes = make()
    assert await controller.check() == ""

    def pages_used() -> Awaitable[int]:
        raise RuntimeError("stage 0 died")

    fakes[0].pages_used = pages_used  # type: ignore[method-assign]
    assert "stage 0 died" in await controller.check()


async def read(controller: PrefillController, work: PrefillJob, stop_after: int) -> tuple[str, list[Any]]:
    """Read at most stop_after events, then close the stream. Returns how it ended."""
    seen: list[Any] = []
    stream = controller.prefill(work)
    try:
        async for event in stream:
            seen.append(event)
            if len(seen) == stop_after:
                await stream.aclose()
                return "closed", seen
    except PrefillCancelled:
        return "cancelled", seen
    except PrefillFailed:
        return "failed", seen
    return "ended", seen


async def abuse(seed: int, fatal: bool) -> None:
    """Ten requests that end in every way at random moments."""
    rng = random.Random(seed)
    poisoned = {f"r{rng.randrange(10)}"}

    def trouble(request_id: str) -> None:
        if request_id in poisoned and rng.random() < 0.2:
            raise RequestFailed("trouble")

    controller, fakes = make(rng.randint(1, 3), 64, lambda: rng.random() * 1e-3, trouble)
    readers: dict[str, asyncio.Task[tuple[str, list[Any]]]] = {}
    chores: list[asyncio.Task[None]] = []
    for number in range(10):
        name, tokens = f"r{number}", rng.randint(1, 500)
        deadline = time.time() + rng.random() * 0.02 if rng.random() < 0.3 else None
        stop_after = rng.choice([1, 2, 99, 99])
        readers[name] = asyncio.create_task(
            read(controller, job(name, tokens, deadline=deadline), stop_after)
        )
        if rng.random() < 0.4:
            chores.append(asyncio.create_task(controller.cancel(name)))
        await asyncio.sleep(rng.random() * 2e-3)
        if rng.random() < 0.2:
            readers[rng.choice(list(readers))].cancel()
    if fatal:
        rng.choice(fakes).stop()
    outcomes = await asyncio.gather(*readers.values(), return_exceptions=True)
    await asyncio.gather(*chores)
    for outcome in outcomes:
        if isinstance(outcome, asyncio.CancelledError):
            continue
        assert isinstance(outcome, tuple), outcome
        ending, seen = outcome
        terminal = [event for event in seen if isinstance(event, PrefillDone | Refused)]
        assert len(terminal) == (ending == "ended") or (ending == "closed" and terminal == seen[-1:])
        assert all(isinstance(event, ChunkRead) for event in seen[:-1])
    if any(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes):
        # A reader that is cancelled while it waits for its pages does not see them come back.
        async with asyncio.timeout(1):
            while controller._requests._pool.used:
                await asyncio.sleep(1e-3)
    if fatal and controller.failure:
        assert controller._requests._pool.used == 0
        return
    await assert_clean(controller, fakes)


@pytest.mark.parametrize("fatal", [False, True])
@timeless
async def test_pages_are_free_however_requests_end(fatal: bool) -> None:
    for seed in range(60):
        await asyncio.wait_for(abuse(seed, fatal), 60)


class HeldStage(FakeStage):
    """Answers a chunk when the test says so."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage, lambda: 0.0, no_trouble)
        self.held: list[tuple[ChunkCommand, asyncio.Future[ChunkReport]]] = []

    def run_chunk(self, command: ChunkCommand) -> Awaitable[ChunkReport]:
        self.held.append((command, asyncio.get_running_loop().create_future()))
        return self.held[-1][1]

    def answer(self, chunk: int) -> None:
        command, owed = self.held[chunk]
        owed.set_result(self._chunk(command))


async def test_chunks_end_in_the_order_they_were_sent() -> None:
    """Even where the event loop hears of the later one first."""
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
