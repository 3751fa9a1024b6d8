"""Stops the scheduler, gives it work or cancels work at each of its awaits, with a runner that computes
nothing."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from deltafront.workers.decode.engine import target_gap_s
from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.request import DecodeRequest
from deltafront.workers.decode.runner import ReadPart, ReadResult
from deltafront.workers.decode.scheduler import DecodeScheduler
from deltafront.workers.decode.step_rows import Row, SampledToken
from deltafront.workers.kv.arrival import KVArrival
from deltafront.workers.kv.handoff.inbox import KVInbox
from deltafront.workers.kv.pages.host_tier import PagesBack
from deltafront.workers.kv.pages.pool import PagePool
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.messages.events import FinishReason
from deltafront.workers.messages.requests import GenerateJob, Reservation, Sampling
from deltafront.workers.settings import DecodeConfig

from ...suspensions import Acting, Inline, at_each_await, until

LAYERS = 4


class Step:
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def chosen(self) -> list[SampledToken]:
        return [SampledToken(7, -1.0)] * self._rows


class Runner:
    """Takes the place of `DecodeRunner`. `after_part` is called once the first layers of a prefill are
    computed."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.after_part: Callable[[], None] = lambda: None
        self.begun: set[int] = set()

    def first_tokens(
        self, logits: Sequence[Any], rows: Sequence[Row], copies: Any, masks: Any
    ) -> list[SampledToken]:
        return Step(len(rows)).chosen()

    def append(
        self, pages: Any, step: Read, last: bool, copy: Any, part: ReadPart | None, _states: Any
    ) -> ReadResult:
        if part is not None:
            self.begun.add(part.key)
            self.after_part()
        return ReadResult()

    def forget_read(self, key: int) -> None:
        self.begun.remove(key)

    def launch(self, rows: Sequence[Row], masks: Any = ()) -> Step:
        return Step(len(rows))


class Scene:
    """Requests on a scheduler. One is cancelled while the KV of its last layers still arrives. Unless
    `alone`, a second one decodes, and a third prefills and decodes."""

    def __init__(self, asynchronous: bool, *, alone: bool = False) -> None:
        self.runner, self.pool = Runner(asynchronous), PagePool(32)
        config = DecodeConfig(cache_tokens=512, page_selection="full", max_batch=2)
        self.scheduler = DecodeScheduler(
            self.runner,  # type: ignore[arg-type]
            Inline(),
            lambda _request: None,
            config,
            (),
            lambda: 0.0,
        )
        self.answers, self.reads = self.request("answers"), self.request("reads", reads=True)
        self.begins = self.request("begins", reads=True, coming=2)
        self.runner.after_part = self.cancel_begun
        self.all = (self.begins,) if alone else (self.begins, self.answers, self.reads)
        for request in self.all:
            self.scheduler.submit(request)

    def request(self, name: str, *, reads: bool = False, coming: int = 0) -> DecodeRequest:
        table = self.pool.allocate(4)
        back = PagesBack(table[:1], (0,), LAYERS, 0.0)
        back.left = coming
        pages = RequestPages(pool=self.pool, table=table, held_tokens=16, coming=(back,) if coming else ())
        request = DecodeRequest(
            serial=table[0],
            layers=LAYERS,
            reservation=Reservation(
                request_id=name, owner="me", new_tokens=3, max_tokens=3, reads_rest=reads
            ),
            pages=pages,
            reserved=0.0,
            renewed=0.0,
            length=16,
        )
        request.inbox = KVInbox(KVArrival(range(LAYERS), 16, 16), pages, lambda: None)
        request.job = GenerateJob(request_id=name, sampling=Sampling(max_tokens=3, ignore_eos=True))
        request.logits = object()
        request.reads = deque([Read(16, array("I", [1, 2, 3]))] if reads else [])
        self.back = back
        return request

    def cancel_begun(self) -> None:
        self.begins.close(FinishReason.CANCELLED, "its client has left")
        self.back.record_layers(0, "it is not needed any more")

    def all_over(self) -> bool:
        return all(request.ended for request in self.all) and not self.runner.begun

    def stop(self) -> None:
        """Close all requests and stop the scheduler, as a closing engine does."""
        for request in self.all:
            request.close(FinishReason.CANCELLED, "the worker is shutting down")
        self.scheduler.stop()


class Paced:
    """A request that answers with three tokens, with a gap between steps while `waiting` is set."""

    def __init__(self, gap_s: float) -> None:
        self.scene = scene = Scene(True, alone=True)
        self.launched: list[float] = []
        self.waiting = True
        clock = asyncio.get_running_loop().time
        config = DecodeConfig(cache_tokens=512, page_selection="full", max_batch=2)
        self.scheduler = DecodeScheduler(
            self,  # type: ignore[arg-type]
            Inline(),
            lambda _request: None,
            config,
            (),
            clock,
            lambda: gap_s if self.waiting else 0.0,
        )
        self.request = scene.request("answers")
        self.scheduler.submit(self.request)
        self.clock, self.asynchronous = clock, True
        self.first_tokens, self.append = scene.runner.first_tokens, scene.runner.append

    def launch(self, rows: Sequence[Row], masks: Any = ()) -> Step:
        self.launched.append(self.clock())
        return Step(len(rows))

    async def run(self) -> list[float]:
        """Return the seconds between the launches of its steps."""
        running = asyncio.create_task(self.scheduler.run())
        async with asyncio.timeout(60):
            while self.request.ended is None:
                await asyncio.sleep(0.001)
        self.scheduler.stop()
        await running
        assert self.request.produced == 3
        return [after - before for before, after in pairwise(self.launched)]


async def test_steps_keep_the_target_gap_while_prompts_wait() -> None:
    gaps = await Paced(0.02).run()
    assert len(gaps) == 1 and gaps[0] >= 0.019, "and none is launched ahead"


@pytest.mark.parametrize(
    ("given", "shared", "prompts", "wanted"),
    [
        (None, True, 0, 0.0),
        (None, True, 1, 0.03),
        (None, True, 2, 0.045),
        (None, False, 2, 0.0),
        (5, True, 1, 0.005),
        (5, False, 9, 0.005),
        (5, True, 0, 0.0),
        (0, True, 9, 0.0),
    ],
)
def test_steps_wait_for_prompts_that_share_the_gpu(
    given: float | None, shared: bool, prompts: int, wanted: float
) -> None:
    assert target_gap_s(DecodeConfig(target_gap_ms=given), shared, prompts) == wanted


async def test_pause_between_steps_ends_when_the_scheduler_stops() -> None:
    paced = Paced(3_600.0)
    running = asyncio.create_task(paced.scheduler.run())
    async with asyncio.timeout(60):
        while not paced.launched:
            await asyncio.sleep(0.001)
        paced.scheduler.stop()
        await running
    assert len(paced.launched) == 1


async def test_prefill_does_not_wait_for_the_gap_between_steps() -> None:
    paced = Paced(3_600.0)
    running = asyncio.create_task(paced.scheduler.run())
    asks = paced.scene.request("asks", reads=True)
    asks.reads = deque(Read(start, array("I", [1])) for start in range(16, 19))
    async with asyncio.timeout(60):
        while not paced.launched:
            await asyncio.sleep(0.001)
        paced.scheduler.submit(asks)
        while not asks.produced:
            await asyncio.sleep(0.001)
    assert len(paced.launched) == 1 and not asks.reads
    paced.scheduler.stop()
    await running


async def test_prefill_turns_do_not_delay_a_step_that_is_due() -> None:
    """Turns of 30 ms: of two between steps 45 ms apart, the second would delay the next step to 60 ms."""
    paced, done, skew = Paced(0.045), list[str](), [0.0]
    append, launch, asks = paced.append, paced.launch, paced.scene.request("asks", reads=True)

    def turn(*given: Any) -> ReadResult:
        skew[0] += 0.03
        done.append("turn")
        return append(*given)

    def step(*given: Any) -> Step:
        done.append("step")
        return launch(*given)

    paced.scheduler._clock = lambda: paced.clock() + skew[0]
    paced.append, paced.launch = turn, step  # type: ignore[method-assign]
    sampling = Sampling(max_tokens=9, ignore_eos=True)
    paced.request.job = GenerateJob(request_id="answers", sampling=sampling)
    asks.reads = deque(Read(start, array("I", [1])) for start in range(16, 22))
    paced.scheduler.submit(asks)
    running = asyncio.create_task(paced.scheduler.run())
    async with asyncio.timeout(60):
        while not asks.produced:
            await asyncio.sleep(0.001)
    assert done[:11] == ["turn", *["step", "turn"] * 5]
    paced.scheduler.stop()
    await running


@pytest.mark.parametrize(("gap_s", "waiting"), [(0.0, True), (3_600.0, False)])
async def test_steps_do_not_pause_without_a_gap_or_waiting_prompts(gap_s: float, waiting: bool) -> None:
    paced = Paced(gap_s)
    paced.waiting = waiting
    assert len(await paced.run()) == 1


AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])


@AHEAD
@pytest.mark.parametrize("alone", [False, True], ids=["busy", "nothing else to do"])
async def test_scheduler_can_be_stopped_at_any_await(ahead: bool, alone: bool) -> None:
    async def stopped_at(number: int) -> bool:
        scene = Scene(ahead, alone=alone)
        acting = Acting(scene.scheduler.run(), number, scene.stop)
        running = acting.start()
        await until(lambda: acting.acted)
        if not acting.acted:
            scene.stop()
        assert await until(running.done), f"it was stopped at its await number {number}, and never ends"
        await running
        return acting.acted

    least = 3 if alone else 7  # alone, it only prefills and waits; else it also decodes
    assert await at_each_await(stopped_at) >= least


@AHEAD
async def test_request_submitted_at_any_await_is_answered(ahead: bool) -> None:
    async def comes_at(number: int) -> bool:
        scene = Scene(ahead)
        late = scene.request("late")
        acting = Acting(scene.scheduler.run(), number, lambda: scene.scheduler.submit(late))
        running = acting.start()
        await until(lambda: acting.acted)
        if acting.acted:
            assert await until(lambda: late.ended), f"it came at await number {number}, and is never answered"
            assert (late.ended, late.produced) == ((FinishReason.LENGTH, ""), 3)
        assert await until(scene.all_over)
        scene.scheduler.stop()
        assert await until(running.done)
        return acting.acted

    assert await at_each_await(comes_at) > 6


@AHEAD
async def test_request_cancelled_at_any_await_frees_its_pages(ahead: bool) -> None:
    async def leaves_at(number: int) -> bool:
        scene = Scene(ahead)
        left = scene.reads
        acting = Acting(
            scene.scheduler.run(), number, lambda: left.close(FinishReason.CANCELLED, "its client has left")
        )
        running = acting.start()
        await until(lambda: acting.acted)
        assert await until(left.pages.freed.is_set), f"cancelled at await number {number}, it keeps its pages"
        assert await until(scene.all_over)
        assert scene.answers.ended == (FinishReason.LENGTH, "") and scene.answers.produced == 3
        scene.scheduler.stop()
        assert await until(running.done)
        assert scene.pool.used == 0
        return acting.acted

    assert await at_each_await(leaves_at) > 6


async def test_kv_that_arrives_at_any_await_is_used() -> None:
    async def come_at(number: int) -> bool:
        scene = Scene(False)
        scene.runner.after_part = lambda: None

        def come() -> None:
            scene.back.record_layers(2)
            scene.scheduler.wake()

        acting = Acting(scene.scheduler.run(), number, come)
        running = acting.start()
        await until(lambda: acting.acted)
        if not acting.acted:
            come()
        assert await until(lambda: scene.begins.ended), f"it came at await number {number}, and is never read"
        assert scene.begins.produced == 3
        scene.scheduler.stop()
        assert await until(running.done)
        return acting.acted

    assert await at_each_await(come_at) > 6
