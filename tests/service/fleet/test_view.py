"""What the door knows of its workers while they answer slowly."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from deltafront.service.errors import WorkerLost
from deltafront.service.fleet.links import LocalDirectory
from deltafront.service.fleet.view import Charge, Fleet, View
from deltafront.workers.messages.states import DecodeStats, GroupStats

from ..fakes import FakeDecode, FakeGroup


async def test_a_slow_worker_keeps_its_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = FakeDecode("decode:d0")
    fleet = Fleet(LocalDirectory([], [decode]), lambda _view: None)
    await fleet.refresh()
    assert set(fleet.view.workers) == {"decode:d0"}
    monkeypatch.setattr("deltafront.service.fleet.view._STATS_PATIENCE_S", 0.05)

    async def stuck() -> None:
        await asyncio.Event().wait()

    decode.stats = stuck  # type: ignore[method-assign,assignment]
    await fleet.refresh()
    assert set(fleet.view.workers) == {"decode:d0"}


async def test_a_poll_keeps_what_was_charged_while_it_asked() -> None:
    decode, asked, told = FakeDecode("decode:d0"), asyncio.Event(), asyncio.Event()
    fleet = Fleet(LocalDirectory([FakeGroup("prefill:g0", lambda *_: None)], [decode]), lambda _view: None)
    await fleet.refresh()
    stats = decode.stats

    async def slow() -> DecodeStats:
        state = await stats()
        asked.set()
        await told.wait()
        return state

    decode.stats = slow  # type: ignore[method-assign]
    polls = [asyncio.create_task(fleet.poll()) for _ in range(2)]
    await asked.wait()
    fleet.charge(Charge("prefill:g0", 500, "decode:d0", 96))
    told.set()
    for poll in polls:
        await poll
        assert fleet.view.workers["decode:d0"].pages_free == decode.total - 96
        assert fleet.view.groups["prefill:g0"].waiting_tokens == 500
    await fleet.poll()
    assert fleet.view.workers["decode:d0"].pages_free == decode.total


def test_a_fleet_whose_workers_all_leave_is_not_ready() -> None:
    group, worker = GroupStats("g", 9, 9, 0, 0, 0, 0.0), DecodeStats("d", 9, 9, 0, 0, 0)
    assert View({"g": group}, {"d": worker}).ready
    leaving = replace(worker, name="e", draining=True)
    assert View({"g": group}, {"d": worker, "e": leaving}).ready
    assert not View({"g": group}, {"e": leaving}).ready
    assert not View({"g": replace(group, draining=True)}, {"d": worker}).ready
    assert not View({}, {"d": worker}).ready


async def test_a_session_is_still_found_on_a_worker_that_leaves() -> None:
    decode = FakeDecode("decode:d0")
    stats = decode.stats

    async def leaving() -> DecodeStats:
        return replace(await stats(), draining=True)

    decode.stats = leaving  # type: ignore[method-assign]
    fleet = Fleet(LocalDirectory([], [decode]), lambda _view: None)
    await fleet.refresh()
    assert not fleet.view.ready
    assert await fleet.session_worker("decode:d0") is decode


async def test_what_is_forgotten_while_a_poll_asks_stays_forgotten() -> None:
    """Its answer is older than its death. The next poll may find that it lives."""
    decode, asked, told = FakeDecode("decode:d0"), asyncio.Event(), asyncio.Event()
    spare, group = FakeDecode("decode:d1"), FakeGroup("prefill:g0", lambda *_: None)
    fleet = Fleet(LocalDirectory([group], [decode, spare]), lambda _view: None)
    await fleet.refresh()
    stats = decode.stats

    async def slow() -> DecodeStats:
        state = await stats()
        asked.set()
        await told.wait()
        return state

    decode.stats = slow  # type: ignore[method-assign]
    polls = [asyncio.create_task(fleet.poll()) for _ in range(2)]
    await asked.wait()
    fleet.forget("decode:d0")
    told.set()
    for poll in polls:
        await poll
        assert set(fleet.view.workers) == {"decode:d1"}
        with pytest.raises(WorkerLost):
            fleet.worker("decode:d0")
    await fleet.refresh()
    assert set(fleet.view.workers) == {"decode:d0", "decode:d1"}


async def test_one_that_loads_keeps_no_look_waiting_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its actor has a name before its constructor has ended."""
    loading, loaded = FakeDecode("decode:new"), asyncio.Event()
    stats = loading.stats

    async def late() -> DecodeStats:
        await loaded.wait()
        return await stats()

    loading.stats = late  # type: ignore[method-assign]
    monkeypatch.setattr("deltafront.service.fleet.view._NEW_PATIENCE_S", 0.01)
    monkeypatch.setattr("deltafront.service.fleet.view._STATS_PATIENCE_S", 3600.0)
    fleet = Fleet(LocalDirectory([FakeGroup("prefill:g0", lambda *_: None)], [loading]), lambda _view: None)
    await fleet.refresh()
    assert set(fleet.view.groups) == {"prefill:g0"} and not fleet.view.workers
    assert fleet.refresh_pause == 0.25, "it looks often while it has nobody"
    loaded.set()
    await fleet.refresh()
    assert set(fleet.view.workers) == {"decode:new"}
    assert fleet.refresh_pause == 1.0
