"""Tests requests that wait in a prefill group for their turn and their pages."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from deltafront.workers.messages.events import PrefillDone
from deltafront.workers.messages.requests import PrefillCancelled, RefusalReason, Refused
from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.prefill.group import request_table
from deltafront.workers.settings import PrefillConfig

from ..timeless import timeless
from .fake_stages import FakeStage, assert_clean, collect, controller_of, job, make, no_trouble


@timeless
async def test_prompts_that_do_not_fit_together_wait_for_each_other() -> None:
    """Three prompts need more than half of the pages each. None is refused."""
    controller, fakes = make(pages=64)
    outcomes = await asyncio.gather(*(collect(controller, job(name, 600)) for name in "abc"))
    assert all(isinstance(events[-1], PrefillDone) for events in outcomes)
    assert [name for kind, name, _ in fakes[0].log if kind in ("open", "close")] == list("aabbcc")
    assert outcomes[2][-1].report.queue > outcomes[1][-1].report.queue > 0
    await assert_clean(controller, fakes)


@timeless
async def test_better_tier_overtakes_a_shorter_prompt_and_has_its_own_queue() -> None:
    config = PrefillConfig(stages=1, chunk_tokens=128, cache_tokens=8192, max_waiting=1, stream_lease_s=1e6)
    fake = FakeStage(0, lambda: 0.5, no_trouble)
    controller = controller_of([fake], config)
    waiting = [asyncio.create_task(collect(controller, job("first", 8192)))]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(collect(controller, job("short", 1024))))
    await asyncio.sleep(0)
    assert await controller.queue_refusal(512) is not None
    assert await controller.queue_refusal(512, ServiceTier.PRIORITY) is None
    waiting.append(
        asyncio.create_task(collect(controller, job("better", 2048, service_tier=ServiceTier.PRIORITY)))
    )
    assert all(isinstance(events[-1], PrefillDone) for events in await asyncio.gather(*waiting))
    assert [name for kind, name, _ in fake.log if kind == "close"] == ["first", "better", "short"]
    await assert_clean(controller, [fake])


@timeless
async def test_controllers_never_reuse_a_request_serial() -> None:
    """Stages outlive their controller, and an `abandon` of the dead controller may still arrive."""
    named: list[int] = []
    for _ in range(2):
        controller, fakes = make(pages=64)
        await asyncio.gather(*(collect(controller, job(name, 600)) for name in "ab"))
        named += fakes[0].serials
        await assert_clean(controller, fakes)
    assert len(set(named)) == 4


async def ways_to_go(controller: Any, name: str) -> list[Any]:
    """Run a request of 600 tokens that ends while it waits, and return how it ended."""
    if name == "late":
        return await collect(controller, job(name, 600, deadline=time.time() + 0.02))
    if name == "closed":
        stream = controller.prefill(job(name, 600))
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.02)
        reading.cancel()
        return list(await asyncio.gather(reading, return_exceptions=True))
    reading = asyncio.ensure_future(collect(controller, job(name, 600)))
    await asyncio.sleep(0.02)
    if name == "cancelled":
        await controller.cancel(name)
    return list(await asyncio.gather(reading, return_exceptions=True))


@pytest.mark.parametrize("name", ["late", "closed", "cancelled", "lost"])
@timeless
async def test_request_that_ends_while_queued_never_reaches_a_stage(name: str) -> None:
    controller, fakes = make(pages=64, pause=lambda: 0.05, lease=0.08)
    running = asyncio.create_task(collect(controller, job("running", 900)))
    await asyncio.sleep(0)
    leaving = asyncio.create_task(ways_to_go(controller, name))
    while not running.done():
        await asyncio.sleep(0.02)
        await controller.renew(["running"])
    (event,) = await leaving
    if name == "late":
        assert isinstance(event, Refused) and event.reason is RefusalReason.DEADLINE
    elif name == "closed":
        assert isinstance(event, asyncio.CancelledError)
    else:
        assert isinstance(event, PrefillCancelled)
    assert {other for _, other, _ in fakes[0].log} == {"running"}
    await assert_clean(controller, fakes)


@timeless
async def test_full_queue_refuses_with_the_time_until_a_place_is_free() -> None:
    config = PrefillConfig(stages=1, chunk_tokens=128, cache_tokens=1024, max_waiting=2, stream_lease_s=1e6)
    fake = FakeStage(0, lambda: 0.5, no_trouble)
    controller = controller_of([fake], config)
    first = asyncio.create_task(collect(controller, job("first", 1024)))
    await asyncio.sleep(0)
    assert await controller.queue_refusal(1024) is None, "nobody waits yet"
    others = [asyncio.create_task(collect(controller, job(name, 1024))) for name in "ab"]
    await asyncio.sleep(0)
    (unknown,) = await collect(controller, job("unknown", 128))
    assert unknown.reason is RefusalReason.BUSY and unknown.retry_after_s is None, "no chunk was seen yet"
    await asyncio.sleep(2.2)
    (refused,) = await collect(controller, job("refused", 1024))
    assert refused.reason is RefusalReason.BUSY and "2 prompts wait already" in refused.message
    stats = await controller.stats()
    assert refused.retry_after_s == pytest.approx(stats.waiting_tokens / stats.tokens_per_second / 3)
    assert 2560 / 256 / 3 / 2 <= refused.retry_after_s <= 2 * 2560 / 256 / 3, (
        "a chunk of 128 tokens takes 0.5 s"
    )
    for turn in range(2, 200):
        next_one = await controller.queue_refusal(1024)
        assert isinstance(next_one, Refused) and next_one.retry_after_s is not None
        turns = pytest.approx(min(turn * refused.retry_after_s, request_table._LONGEST_TURN_S), rel=0.1)
        assert next_one.retry_after_s == turns, "one after the other"
    await first
    assert await controller.queue_refusal(1024) is None
    await asyncio.gather(*others)
    assert isinstance((await collect(controller, job("again", 128)))[-1], PrefillDone)
    await assert_clean(controller, [fake])


@timeless
async def test_big_prompt_is_not_starved_by_small_ones_holding_pages() -> None:
    """There are always enough small prompts to fill the stage."""
    config = PrefillConfig(stages=1, chunk_tokens=128, cache_tokens=1024, stream_lease_s=1e6)
    fake = FakeStage(0, lambda: 0.01, no_trouble)
    controller = controller_of([fake], config)
    crowd: list[asyncio.Task[Any]] = []

    async def keep_coming() -> None:
        for number in range(400):
            crowd.append(asyncio.create_task(collect(controller, job(f"small{number}", 256))))
            await asyncio.sleep(0.02)

    coming = asyncio.create_task(keep_coming())
    await asyncio.sleep(0.1)
    assert isinstance((await collect(controller, job("big", 1024)))[-1], PrefillDone)
    assert not coming.done(), "it was served in the middle of the stream"
    await coming
    for one in crowd:
        last = (await one)[-1]
        assert isinstance(last, PrefillDone) or last.reason is RefusalReason.BUSY
    await assert_clean(controller, [fake])
