"""Tests that a worker that is removed first finishes its work, up to a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from deltafront.tests.states import decode_stats, group_stats
from deltafront.workers.leaving import Leaving
from deltafront.workers.messages.states import DecodeStats, GroupStats
from deltafront.workers.replica import Replica

from .timeless import timeless

BUSY = group_stats(running=1, waiting_tokens=10)
WAITED_FOR = group_stats(waiting=1, waiting_tokens=10)
IDLE = group_stats()
LENT = group_stats(pages_free=96)
"""No prompt is prefilled any more, but decode workers still read the group's pages."""
KEPT = decode_stats(pages_free=99, sessions=1)
EMPTY = decode_stats()


class Hosted:
    renewed = False

    async def renew(self, request_ids: Sequence[str]) -> None:
        self.renewed = True


class Head(Leaving):
    """Reports `states` one by one, then repeats the last. Records whether it was draining at each report."""

    settled_s = 0.02

    def __init__(self, *states: GroupStats | DecodeStats) -> None:
        self._states = iter(states)
        self._last = states[-1]
        self.asked: list[tuple[Any, bool]] = []
        self.fault = ""
        self.hosted = Hosted()

    async def check(self) -> str:
        return self.fault

    async def stats(self) -> GroupStats | DecodeStats:
        state = next(self._states, self._last)
        self.asked.append((state, self.draining))
        return state


@pytest.mark.parametrize(
    "states", [(BUSY, WAITED_FOR, BUSY, IDLE), (KEPT, KEPT, EMPTY), (BUSY, IDLE, BUSY, IDLE)]
)
@timeless
async def test_drain_ends_once_the_worker_has_stayed_idle(states: tuple[Any, ...]) -> None:
    head = Head(*states)
    await head.drain(within_s=600)
    assert [state for state, _ in head.asked[: len(states)]] == list(states)
    assert len(head.asked) > len(states), "idle once is not idle"
    assert all(draining for _, draining in head.asked)


@timeless
async def test_drain_lasts_while_an_api_server_renews_leases() -> None:
    head, stop = Head(IDLE), asyncio.Event()

    async def door() -> None:
        while not stop.is_set():
            await head.renew(())
            await asyncio.sleep(0.001)

    asking, leaving = asyncio.create_task(door()), asyncio.create_task(head.drain(within_s=600))
    while len(head.asked) < 30:  # it checks ten times before an idle worker ends
        assert not leaving.done()
        await asyncio.sleep(0.001)
    stop.set()
    await asyncio.wait_for(leaving, 60)
    await asking
    assert head.hosted.renewed


@timeless
async def test_draining_group_stays_while_its_kv_is_being_copied() -> None:
    head = Head(*[LENT] * 30, IDLE)  # an idle worker ends after ten checks
    await head.drain(within_s=600)
    assert [state for state, _ in head.asked].count(LENT) == 30


@timeless
async def test_drain_ends_at_its_deadline_and_says_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    head = Head(KEPT)
    await head.drain(within_s=0.05)
    assert head.asked and head.draining
    assert caplog.messages == ["not drained after 0.05 s, this is left: sessions: 1, pages in use: 1"]


@timeless
async def test_drain_ends_only_at_a_poll_that_finds_the_worker_idle() -> None:
    """Draining ends only at a check, so that a request that arrives between two checks is seen."""
    head, looks, clock = Head(IDLE), list[float](), asyncio.get_running_loop().time
    stats = head.stats

    async def look() -> Any:
        looks.append(clock())
        return await stats()

    head.stats = look  # type: ignore[method-assign]
    await head.drain(within_s=600)
    assert looks[-1] == clock() >= head.settled_s


@timeless
async def test_drain_does_not_wait_for_a_faulty_worker() -> None:
    head = Head(BUSY)
    head.fault = "broken"
    await head.drain(within_s=600)
    assert head.draining and not head.asked


class Owner(Replica):
    """A replica that behaves as inside Serve."""

    def __init__(self, head: Any, drain_s: float = 7.0) -> None:
        super().__init__("prefill:", drain_s)
        self._bundles = object()
        self.head = head


def actor(calls: list[float], error: Exception | None = None) -> Any:
    async def drain(within_s: float) -> None:
        calls.append(within_s)
        await asyncio.sleep(0)
        if error is not None:
            raise error

    return SimpleNamespace(drain=SimpleNamespace(remote=drain))


def dead() -> Iterator[Exception]:
    from ray.exceptions import ActorDiedError, RayTaskError

    yield ActorDiedError()
    yield RayTaskError("drain", "", RuntimeError("x"))


async def test_serve_drains_the_head_actor_only_once() -> None:
    calls: list[float] = []
    owner = Owner(actor(calls))
    await owner.__del__()
    assert calls == [7.0]
    assert owner.__del__() is None


async def test_drain_does_not_wait_for_a_dead_head_actor() -> None:
    for error in dead():
        calls: list[float] = []
        await Owner(actor(calls, error)).__del__()
        assert calls == [7.0]


def test_drain_returns_at_once_outside_serve_or_without_time() -> None:
    owner = Owner(None, drain_s=0.0)
    assert owner.__del__() is None
    outside = Owner(None)
    outside._bundles = None
    assert outside.__del__() is None
