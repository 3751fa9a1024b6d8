"""What the door knows of its workers while they answer slowly."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

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
