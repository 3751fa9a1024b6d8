"""Tests reservations that wait for pages: their order, their length, and that nothing is left of cancelled
ones."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.workers.decode.scheduler import DecodeScheduler
from deltafront.workers.kv.pages.waiting import ReservationTime, page_returns, seconds_until_room
from deltafront.workers.messages.requests import (
    DecodeFailed,
    GenerateJob,
    RefusalReason,
    Refused,
    RequestOptions,
    Reservation,
    Reserved,
    Sampling,
)
from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.settings import DecodeConfig

from ..prompts import SHORT, Clock, ids_of, packed

# --- predicted waits --------------------------------------------------------------------------------------

small = st.integers(1, 6)


@given(
    small,
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 9), small), max_size=6),
    st.lists(small, max_size=4),
    st.integers(1, 9),
)
def test_predicted_time_until_pages_are_free_equals_a_simulation(
    pages: int, free: int, returns: list[tuple[int, int]], ahead: list[int], hold: int
) -> None:
    """The simulation advances in seconds: first ending requests free pages, then the first reservation in the
    queue takes its pages."""
    found = seconds_until_room(pages, free, returns, ahead, hold)
    ends, line = list(returns), [*ahead, pages]
    for second in itertools.count():
        free += sum(n for end, n in ends if end == second)
        ends = [(end, n) for end, n in ends if end > second]
        while line and line[0] <= free:
            free -= line[0]
            ends.append((second + hold, line.pop(0)))
        if not line or not ends:
            assert found == (None if line else second)
            return


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 9))), max_size=6))
def test_predicts_that_a_shared_page_is_free_after_its_last_request(held: list[tuple[int, set[int]]]) -> None:
    found = dict(page_returns(held))
    for second in range(6):
        back = [
            page for page in range(10) if max((e for e, own in held if page in own), default=-1) == second
        ]
        assert found.get(second, 0) == len(back)


def test_reservation_that_outlasts_the_mean_is_expected_to_end_soon() -> None:
    hold = ReservationTime()
    assert hold.mean is None
    hold.record(8.0)
    assert (hold.mean, hold.left(3.0), hold.left(100.0)) == (8.0, 5.0, 2.0)
    for _ in range(100):
        hold.record(20.0)
    assert hold.mean == pytest.approx(20.0, rel=1e-3)


# --- on a worker ------------------------------------------------------------------------------------------


def reservation_of(name: str, tokens: int, **more: Any) -> Reservation:
    return Reservation(request_id=name, owner="me", new_tokens=tokens, max_tokens=0, **{"wait": True, **more})


async def reserving(run: Any, *reservations: Reservation) -> list[asyncio.Task[Any]]:
    """Start to reserve these requests, one after the other."""
    tasks = []
    for one in reservations:
        tasks.append(asyncio.create_task(run.engine.reserve(one)))
        await asyncio.sleep(0)
    return tasks


async def test_reservations_wait_in_order_of_arrival(bench: Any) -> None:
    run = await bench(cache_tokens=640)
    await run.reserve("half", 320, 0)
    await run.reserve("most", 256, 0)
    big, small = await reserving(run, reservation_of("big", 480), reservation_of("small", 16))
    now = await run.engine.reserve(reservation_of("now", 16, wait=False))
    assert isinstance(now, Refused) and now.reason is RefusalReason.PAGES
    assert "2 reservations wait" in now.message
    stats = await run.engine.stats()
    assert (stats.waiting, stats.decoding) == (4, 0), "two lack pages and two K/V"
    await run.engine.cancel("most")
    await asyncio.sleep(0.3)
    assert not big.done() and not small.done(), "there is room for the small one, but not its turn"
    await run.engine.cancel("half")
    assert await big == Reserved(pages=30) and await small == Reserved(pages=1)
    for name in ("big", "small"):
        await run.engine.cancel(name)
    assert run.used == 0


async def test_pages_that_become_free_go_to_tiers_in_turn(bench: Any) -> None:
    run = await bench(cache_tokens=640)
    await run.reserve("all", 640, 0)
    tiers = {"early": ServiceTier.FLEX, "late": ServiceTier.FLEX, "better": ServiceTier.PRIORITY}
    waiting = await reserving(
        run,
        *(
            reservation_of(name, 320, options=RequestOptions(service_tier=tier))
            for name, tier in tiers.items()
        ),
    )
    await run.engine.cancel("all")
    early, late, better = waiting
    assert isinstance(await better, Reserved) and isinstance(await early, Reserved) and not late.done()
    await run.engine.cancel("better")
    assert isinstance(await late, Reserved)
    for name in ("early", "late"):
        await run.engine.cancel(name)
    assert run.used == 0


def test_places_in_the_batch_go_to_tiers_by_weight() -> None:
    config = DecodeConfig(max_batch=8)
    nothing: Any = None
    scheduler = DecodeScheduler(nothing, nothing, nothing, config, (), lambda: 0.0)
    for tier in (ServiceTier.FLEX, ServiceTier.DEFAULT):
        for number in range(9):
            request: Any = SimpleNamespace(
                name=f"{tier}{number}",
                options=RequestOptions(service_tier=tier),
                times=SimpleNamespace(),
                reads=(),
            )
            scheduler.submit(request)
    admitted: list[Any] = scheduler._admit()
    assert [one.name for one in admitted if one.name.startswith("flex")] == ["flex0", "flex1"]
    assert [one.name for one in admitted if one.name.startswith("default")] == [
        f"default{number}" for number in range(6)
    ]


async def test_refuses_impossible_reservations_at_once(bench: Any) -> None:
    run = await bench(cache_tokens=640)
    await run.reserve("all", 640, 0)
    (waiting,) = await reserving(run, reservation_of("waiting", 16))
    for reservation, reason in (
        (reservation_of("large", 656), RefusalReason.TOO_LARGE),
        (reservation_of("session", 16, session_id="test.none"), RefusalReason.NO_SESSION),
        (reservation_of("waiting", 16), RefusalReason.DUPLICATE),
    ):
        answer = await run.engine.reserve(reservation)
        assert isinstance(answer, Refused) and answer.reason is reason
    await run.engine.cancel("all")
    assert isinstance(await waiting, Reserved)
    await run.engine.cancel("waiting")


async def test_cancel_deadline_lease_or_time_limit_ends_a_reservations_wait(bench: Any) -> None:
    clock = Clock()
    run = await bench(cache_tokens=640, wall=clock, clock=clock, stream_lease_s=10.0, max_wait_s=20.0)
    await run.reserve("all", 640, 0)
    names = ("cancelled", "late", "lost", "patient", "last")
    options = {"late": RequestOptions(deadline=1005.0)}
    reservations = [reservation_of(name, 480, options=options.get(name, RequestOptions())) for name in names]
    cancelled, late, lost, patient, last = await reserving(run, *reservations)
    await run.engine.cancel("cancelled")
    with pytest.raises(DecodeFailed, match="cancelled"):
        await cancelled
    for moment in (5.0, 5.0, 6.0):
        clock.now += moment
        await run.engine.renew(["all", "patient", "last"])
        await asyncio.sleep(0.25)
    assert (await late).reason is RefusalReason.DEADLINE
    with pytest.raises(DecodeFailed, match="no door renewed"):
        await lost
    assert not patient.done() and not last.done()
    await run.engine.cancel("all")
    assert isinstance(await patient, Reserved)
    clock.now += 5.0
    await run.engine.renew(["patient"])
    refused = await last
    assert refused.reason is RefusalReason.PAGES and "did not become free in 20 s" in refused.message
    assert refused.retry_after_s is not None, "a request has ended, so it is known how long they take"
    await run.engine.cancel("patient")
    assert run.used == 0


async def test_refuses_a_long_wait_at_once_with_a_retry_time(bench: Any) -> None:
    clock = Clock()
    run = await bench(cache_tokens=640, clock=clock, stream_lease_s=1e6, max_wait_s=20.0)
    await run.reserve("a", 640, 0)
    clock.now += 30.0
    await run.engine.cancel("a")
    await run.reserve("b", 640, 0)
    clock.now += 5.0
    refused = await run.engine.reserve(reservation_of("c", 16))
    assert isinstance(refused, Refused) and refused.retry_after_s == pytest.approx(25.0)
    clock.now += 6.0
    (waiting,) = await reserving(run, reservation_of("d", 640))
    second = await run.engine.reserve(reservation_of("e", 16))
    assert second.retry_after_s == pytest.approx(19.0 + 30.0), "after d, which will hold all pages"
    await run.engine.cancel("b")
    assert isinstance(await waiting, Reserved)
    await run.engine.cancel("d")


async def test_reservation_of_a_disconnected_caller_leaves_the_queue(bench: Any) -> None:
    run = await bench(cache_tokens=640)
    await run.reserve("all", 640, 0)
    first, second = await reserving(run, reservation_of("first", 640), reservation_of("second", 640))
    first.cancel()
    await run.engine.cancel("all")
    assert isinstance(await second, Reserved)
    with pytest.raises(asyncio.CancelledError):
        await first
    await run.engine.cancel("second")
    assert run.used == 0


async def test_closing_the_decode_worker_ends_waiting_reservations(bench: Any) -> None:
    run = await bench(cache_tokens=640)
    await run.reserve("all", 640, 0)
    (waiting,) = await reserving(run, reservation_of("waiting", 16))
    run.may_fault = True  # the loops of a closed engine have stopped
    await run.engine.close()
    with pytest.raises(DecodeFailed, match="shutting down"):
        await waiting


async def test_ending_a_session_admits_a_waiting_reservation(bench: Any) -> None:
    run = await bench(cache_tokens=640)
    first = await run.ask("a", ids_of(300), SHORT, keep_tokens=300, keep_ttl_s=5.0)
    (waiting,) = await reserving(run, reservation_of("waiting", 600))
    assert await run.engine.release_session(first.first.session.session_id, "me")
    assert isinstance(await waiting, Reserved)
    await run.engine.cancel("waiting")


async def test_pages_shared_by_two_sessions_are_free_after_both_end(bench: Any) -> None:
    wall = Clock()
    run = await bench(wall=wall, cache_tokens=1024)
    first = await run.ask("a", ids_of(640), SHORT, keep_tokens=640, keep_ttl_s=5)
    session = first.first.session.session_id
    await run.reserve("b", 16, 2, session_id=session, keep_tokens=656, keep_ttl_s=600)
    job = GenerateJob(
        request_id="b",
        sampling=Sampling(max_tokens=2),
        extend_ids=packed(ids_of(16)),
        keep_tokens=656,
    )
    await run.collect(job)
    await run.engine.renew(["a", "b"])
    refused = await run.engine.reserve(reservation_of("c", 600, wait=False))
    assert isinstance(refused, Refused) and refused.retry_after_s == pytest.approx(600)
    wall.now += 6
    assert isinstance(await run.engine.reserve(reservation_of("d", 600, wait=False)), Refused)
