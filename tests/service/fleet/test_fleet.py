"""A door's view of its workers while they answer slowly."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from ray.exceptions import RpcError

from deltafront.service.errors import NotFound, Unavailable, WorkerLost
from deltafront.service.fleet import fleet as fleet_module
from deltafront.service.fleet import ray_directory
from deltafront.service.fleet.fleet import Fleet, WorkerHandles
from deltafront.service.fleet.fleet_view import Charge, FleetView
from deltafront.tests.states import decode_stats, group_stats
from deltafront.workers import waits
from deltafront.workers.messages.states import DecodeStats

from ..directory import LocalDirectory
from ..fakes import FakeDecode, FakeGroup

W = TypeVar("W", FakeDecode, FakeGroup)


def changed(worker: W, **state: Any) -> W:
    """Return a fake worker with a changed state."""
    stats = worker.stats

    async def said() -> Any:
        return replace(await stats(), **state)

    worker.stats = said  # type: ignore[method-assign]
    return worker


def answering_late(worker: FakeDecode, asked: asyncio.Event, told: asyncio.Event) -> None:
    """Return a fake worker that answers with its state at the time of the call, but only after `told`
    is set."""
    stats = worker.stats

    async def slow() -> DecodeStats:
        state = await stats()
        asked.set()
        await told.wait()
        return state

    worker.stats = slow  # type: ignore[method-assign]


async def test_last_state_of_a_worker_is_used_if_its_stats_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = FakeDecode("decode:d0")
    fleet = Fleet(LocalDirectory([], [decode]), lambda _view: None)
    await fleet.refresh()
    assert set(fleet.view.workers) == {"decode:d0"}
    monkeypatch.setattr("deltafront.service.fleet.fleet._STATS_TIMEOUT_S", 0.05)

    async def stuck() -> None:
        await asyncio.Event().wait()

    decode.stats = stuck  # type: ignore[method-assign,assignment]
    await fleet.refresh()
    assert set(fleet.view.workers) == {"decode:d0"}


async def test_poll_does_not_undo_pages_charged_while_it_ran() -> None:
    decode, asked, told = FakeDecode("decode:d0"), asyncio.Event(), asyncio.Event()
    fleet = Fleet(LocalDirectory([FakeGroup("prefill:g0", lambda *_: None)], [decode]), lambda _view: None)
    await fleet.refresh()
    answering_late(decode, asked, told)
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


async def test_concurrent_polls_share_one_call_per_worker() -> None:
    decode, asked, told = FakeDecode("decode:d0"), asyncio.Event(), asyncio.Event()
    fleet = Fleet(LocalDirectory([], [decode]), lambda _view: None)
    await fleet.refresh()
    stats, questions = decode.stats, list[int]()

    async def counted() -> DecodeStats:
        questions.append(decode.total)
        state = await stats()
        asked.set()
        await told.wait()
        return state

    decode.stats = counted  # type: ignore[method-assign]
    early = [asyncio.create_task(fleet.poll_shared()) for _ in range(50)]
    await asked.wait()
    decode.total = 77
    late = [asyncio.create_task(fleet.poll_shared()) for _ in range(50)]
    await asyncio.sleep(0)
    told.set()
    await asyncio.gather(*early, *late)
    assert questions == [4096, 77]
    assert fleet.view.workers["decode:d0"].pages_total == 77
    await fleet.poll_shared()
    assert len(questions) == 3
    await fleet.stop()


async def test_unreachable_ray_control_store_raises_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def listed() -> Any:
        raise RpcError("the control store is gone", 14)

    monkeypatch.setattr(ray_directory, "_list_actors", listed)
    with pytest.raises(Unavailable, match=r"does not say which workers there are \(RpcError\)") as caught:
        await ray_directory.RayDirectory().find()
    assert caught.value.retry_after_s


async def test_stopping_door_logs_the_worker_calls_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "SLOW_S", 0.01)
    monkeypatch.setattr(fleet_module, "_STOP_TIMEOUT_S", 0.0)
    let_go, decode = asyncio.Event(), FakeDecode("decode:d0")
    fleet = Fleet(LocalDirectory([], [decode]), lambda _view: None)

    async def stubborn(_request_id: str) -> None:
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()

    decode.cancel = stubborn  # type: ignore[method-assign]
    fleet.cancel(decode, "r1")
    await asyncio.sleep(0)
    stopping = asyncio.create_task(fleet.stop())
    while not caplog.messages:
        await asyncio.sleep(0.005)
    let_go.set()
    await stopping
    assert "waits for calls of workers that were cancelled: cancel r1 on decode:d0" in caplog.messages[0]


async def test_cancelling_one_poll_keeps_it_for_other_callers() -> None:
    decode, asked, told = FakeDecode("decode:d0"), asyncio.Event(), asyncio.Event()
    fleet = Fleet(LocalDirectory([], [decode]), lambda _view: None)
    await fleet.refresh()
    answering_late(decode, asked, told)
    first, second = (asyncio.create_task(fleet.poll_shared()) for _ in range(2))
    await asked.wait()
    first.cancel()
    told.set()
    await second
    assert first.cancelled()
    await fleet.poll_shared()
    await fleet.stop()


async def test_concurrent_lookups_of_a_lost_worker_share_one_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode, directory, looks = FakeDecode("decode:d1"), LocalDirectory([], []), 0

    async def find() -> WorkerHandles:
        nonlocal looks
        looks += 1
        return WorkerHandles({}, {"decode:d1": decode})

    monkeypatch.setattr(directory, "find", find)
    fleet = Fleet(directory, lambda _view: None)
    names = ["decode:d0", "decode:d1"] * 20
    answers = await asyncio.gather(*map(fleet.session_worker, names), return_exceptions=True)
    assert {type(answer) for answer in answers[::2]} == {NotFound}
    assert all(answer is decode for answer in answers[1::2])
    assert looks == 1


async def test_poll_does_not_drop_a_worker_discovered_meanwhile() -> None:
    decode, asked, told = FakeDecode("decode:d0"), asyncio.Event(), asyncio.Event()
    directory = LocalDirectory([], [decode])
    fleet = Fleet(directory, lambda _view: None)
    await fleet.refresh()
    stats = decode.stats
    answering_late(decode, asked, told)
    asking = asyncio.create_task(fleet.poll_shared())
    await asked.wait()
    decode.stats = stats  # type: ignore[method-assign]
    directory.workers.append(FakeDecode("decode:d1"))
    await fleet.refresh()
    told.set()
    await asking
    assert set(fleet.view.workers) == {"decode:d0", "decode:d1"}
    assert fleet.worker("decode:d1") is directory.workers[1]
    asked.clear(), told.clear()
    answering_late(decode, asked, told)
    asking = asyncio.create_task(fleet.poll_shared())
    await asked.wait()
    directory.workers[0] = again = FakeDecode("decode:d0", total=5)
    await fleet.refresh()
    told.set()
    await asking
    assert fleet.worker("decode:d0") is again, "it was started anew"
    assert fleet.view.workers["decode:d0"].pages_total == 5
    await fleet.stop()


def test_requests_go_to_draining_workers_only_if_all_drain() -> None:
    group, worker = (
        group_stats(pages_total=9, pages_free=9),
        decode_stats(pages_total=9, pages_free=9),
    )
    leaving, gone = replace(worker, name="e", draining=True), replace(group, draining=True)
    for view, last in (
        (FleetView({"g": group}, {"d": worker}), set()),
        (FleetView({"g": group}, {"d": worker, "e": leaving}), set()),
        (FleetView({"g": group}, {"e": leaving}), {"e"}),
        (FleetView({"g": gone}, {"e": leaving}), {"g", "e"}),
    ):
        assert view.ready and view.last_resort == last
    assert not FleetView({}, {"d": worker}).ready and not FleetView({}, {"d": worker}).last_resort


async def test_last_worker_of_a_role_is_renewed_until_another_exists() -> None:
    """The renewals name no requests, because there are none."""
    old, group = changed(FakeDecode("decode:old"), draining=True), FakeGroup("prefill:g0", lambda *_: None)
    directory = LocalDirectory([group], [old])
    fleet = Fleet(directory, lambda _view: None)
    await fleet.refresh()
    await fleet._renew()
    assert (old.renewed, group.renewed) == ([()], [])
    directory.workers.append(FakeDecode("decode:new"))
    await fleet.refresh()
    await fleet._renew()
    assert old.renewed == [()]


async def test_door_ignores_workers_with_another_configuration_fingerprint() -> None:
    groups = [changed(FakeGroup(f"prefill:{one}", lambda *_: None), pairing=one) for one in ("old", "new")]
    old, new = (changed(FakeDecode(f"decode:{one}"), pairing=one) for one in ("old", "new"))
    fleet = Fleet(LocalDirectory(groups, [old, new]), lambda _view: None, pairing="new")
    await fleet.refresh()
    assert (set(fleet.view.groups), set(fleet.view.workers)) == ({"prefill:new"}, {"decode:new"})
    assert await fleet.session_worker("decode:new") is new
    with pytest.raises(NotFound):
        await fleet.session_worker("decode:old")


async def test_new_door_takes_over_once_its_workers_are_ready() -> None:
    """Until then the doors of the old configuration serve."""
    old = changed(FakeDecode("decode:old"), pairing="old")
    directory = LocalDirectory([FakeGroup("prefill:g0", lambda *_: None)], [old])
    fleet = Fleet(directory, lambda _view: None, pairing="new")
    taking_over = asyncio.create_task(fleet.wait_to_take_over())
    await fleet.refresh()
    await asyncio.sleep(0)
    assert not taking_over.done()
    directory.workers.append(changed(FakeDecode("decode:new"), pairing="new"))
    await fleet.refresh()
    await asyncio.wait_for(taking_over, 60)


async def test_first_door_does_not_wait_for_workers() -> None:
    fleet = Fleet(LocalDirectory([], []), lambda _view: None, pairing="new")
    await fleet.refresh()
    await asyncio.wait_for(fleet.wait_to_take_over(), 60)
    assert not fleet.view.ready, "it waited for a worker"


async def test_session_on_a_draining_worker_can_still_be_used() -> None:
    decode = changed(FakeDecode("decode:d0"), draining=True)
    fleet = Fleet(LocalDirectory([], [decode]), lambda _view: None)
    await fleet.refresh()
    assert await fleet.session_worker("decode:d0") is decode


async def test_worker_forgotten_during_a_poll_stays_forgotten() -> None:
    """The worker's answer may be older than its death. The next poll may find the worker again."""
    decode, asked, told = FakeDecode("decode:d0"), asyncio.Event(), asyncio.Event()
    spare, group = FakeDecode("decode:d1"), FakeGroup("prefill:g0", lambda *_: None)
    fleet = Fleet(LocalDirectory([group], [decode, spare]), lambda _view: None)
    await fleet.refresh()
    answering_late(decode, asked, told)
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


async def test_loading_worker_does_not_delay_discovery_of_other_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An actor can be found by name before its constructor has ended."""
    loading, loaded = FakeDecode("decode:new"), asyncio.Event()
    stats = loading.stats

    async def late() -> DecodeStats:
        await loaded.wait()
        return await stats()

    loading.stats = late  # type: ignore[method-assign]
    monkeypatch.setattr("deltafront.service.fleet.fleet._NEW_TIMEOUT_S", 0.01)
    monkeypatch.setattr("deltafront.service.fleet.fleet._STATS_TIMEOUT_S", 3600.0)
    fleet = Fleet(LocalDirectory([FakeGroup("prefill:g0", lambda *_: None)], [loading]), lambda _view: None)
    await fleet.refresh()
    assert set(fleet.view.groups) == {"prefill:g0"} and not fleet.view.workers
    assert fleet.refresh_pause == 0.25, "it looks often while it has nobody"
    loaded.set()
    await fleet.refresh()
    assert set(fleet.view.workers) == {"decode:new"}
    assert fleet.refresh_pause == 1.0
