"""Tests how requests and the group end: deadlines, leases, failures, stops and cancellations at random
moments."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from deltafront.workers import waits
from deltafront.workers.messages.events import ChunkRead, PrefillDone, PrefillQueued
from deltafront.workers.messages.requests import (
    PrefillCancelled,
    PrefillFailed,
    PrefillJob,
    RefusalReason,
    Refused,
)
from deltafront.workers.messages.stages import (
    HandoffFailed,
    RequestFailed,
)
from deltafront.workers.prefill.group.controller import PrefillController

from ..timeless import timeless
from .fake_stages import (
    assert_clean,
    collect,
    job,
    make,
)


@timeless
async def test_lost_group_stops_polling_stages_for_free_pages() -> None:
    """The group may be lost between two polls. A dead stage would never answer the next one."""
    controller, fakes = make()
    fakes[0].lent["a"] = 10**9
    reading = asyncio.create_task(collect(controller, job("a", 128)))
    while not (fakes[0].lent["a"] < 10**9 - 3 and all(one.done() for fake in fakes for one in fake._owed)):
        await asyncio.sleep(0.0001)
    await asyncio.sleep(0.001)  # the answers have arrived, and the controller pauses
    asked = fakes[0].log.count(("close", "a", 0))
    controller._fail(RuntimeError("stage 1 died"))
    await reading
    await controller.stop()
    assert fakes[0].log.count(("close", "a", 0)) == asked


@timeless
async def test_stopping_group_logs_its_stages_unanswered_commands(
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
async def test_expired_lease_is_checked_again_before_the_request_ends() -> None:
    """The second check lets renewals count that queued while the process was suspended."""
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
async def test_dead_stage_fails_all_requests_with_one_line() -> None:
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
async def test_stopping_group_waits_for_its_stages_answers() -> None:
    """Otherwise a task would remain in an event loop that is about to end."""

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
async def test_health_check_notices_a_stage_that_died_while_idle() -> None:
    controller, fakes = make()
    assert await controller.check() == ""

    def pages_used() -> Awaitable[int]:
        raise RuntimeError("stage 0 died")

    fakes[0].pages_used = pages_used  # type: ignore[method-assign]
    assert "stage 0 died" in await controller.check()


async def read(controller: PrefillController, work: PrefillJob, stop_after: int) -> tuple[str, list[Any]]:
    """Read at most stop_after events, then close the stream. Returns how the request ended."""
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
    """Run ten requests that end in every way at random moments."""
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
        assert all(isinstance(event, ChunkRead | PrefillQueued) for event in seen[:-1])
    if any(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes):
        # A caller that is cancelled while it waits for free pages does not see them become free.
        async with asyncio.timeout(1):
            while controller._requests._pool.used:
                await asyncio.sleep(1e-3)
    if fatal and controller.failure:
        assert controller._requests._pool.used == 0
        return
    await assert_clean(controller, fakes)


@pytest.mark.parametrize("fatal", [False, True])
@timeless
async def test_frees_all_pages_however_requests_end(fatal: bool) -> None:
    for seed in range(60):
        await asyncio.wait_for(abuse(seed, fatal), 60)
