"""Compares the accounting of sessions, reservations and KV arrivals with plain models of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafront.workers.kv.arrival import ArrivalError, KVArrival
from deltafront.workers.kv.pages.leases import Leases
from deltafront.workers.kv.pages.page_manager import PageManager
from deltafront.workers.kv.pages.pool import OutOfPages, PagePool
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.messages.requests import RefusalReason, Refused, Reservation


def table(pages: int = 8, max_ttl_s: float = 100.0) -> tuple[PagePool, Leases]:
    pool = PagePool(pages)
    return pool, Leases("w1", pool, max_ttl_s)


def test_only_the_owner_finds_a_session_until_it_expires() -> None:
    pool, sessions = table()
    made = sessions.adopt("me", pool.allocate(2), 20, 10.0, now=5.0)
    assert made.session_id.startswith("w1.") and made.expires == 15.0
    assert sessions.find(made.session_id, "me", 14.9) is made
    assert sessions.find(made.session_id, "you", 14.9) is None
    assert sessions.find(made.session_id, "me", 15.0) is None
    assert not sessions.release(made.session_id, "you", 6.0)
    assert sessions.expire(14.9) == 0 and pool.used == 2
    assert sessions.expire(15.0) == 1 and pool.used == 0 and len(sessions) == 0


@pytest.mark.parametrize(("asked", "granted"), [(10.0, 10.0), (500.0, 100.0), (0.0, 100.0), (-1.0, 100.0)])
def test_session_lifetime_is_limited_to_the_maximum(asked: float, granted: float) -> None:
    pool, sessions = table()
    assert sessions.adopt("", pool.allocate(1), 16, asked, now=0.0).expires == granted


def test_sessions_get_unique_ids_and_need_pages_for_their_tokens() -> None:
    pool, sessions = table(64)
    ids = {sessions.adopt("", pool.allocate(1), 1, 1.0, 0.0).session_id for _ in range(50)}
    assert len(ids) == 50
    with pytest.raises(ValueError, match="17 tokens"):
        sessions.adopt("", pool.allocate(1), 17, 1.0, 0.0)


# --- reservations ---------------------------------------------------------------------------------------


def pages_of(pages: int, positions: int = 4096) -> PageManager:
    pool, sessions = table(pages)
    return PageManager(pool, sessions, positions)


def reserve(pages: PageManager, prompt: int, new: int, **more: Any) -> RequestPages:
    answer = pages.reserve(
        Reservation(request_id="r", owner="me", new_tokens=prompt, max_tokens=new, **more), now=0.0
    )
    assert isinstance(answer, RequestPages), answer
    return answer


def test_a_request_on_a_session_shares_full_pages_and_copies_the_last() -> None:
    pages = pages_of(20)
    first = reserve(pages, 40, 8, keep_tokens=40)
    assert (len(first.table), len(first.spare)) == (3, 1)
    pages.prepare_session(first, 40)
    assert first.copy_out == (first.table[2], first.spare[0])
    copied = first.copy_out
    session = pages.keep_session(first, 40, "me", 10.0, now=0.0)
    assert session.pages[:2] == first.table[:2] and session.pages[2] != first.table[2]
    assert copied == (first.table[2], session.pages[2])
    second = reserve(pages, 10, 20, session_id=session.session_id)
    assert second.held_tokens == 40 and len(second.table) == 5
    assert second.table[:2] == session.pages[:2] and second.table[2] not in session.pages
    assert second.copy_in == (session.pages[2], second.table[2])
    assert pages.pool._references[session.pages[0]] == 3
    for held in (first, second):
        held.end()
    assert pages.pool.used == 3
    pages.leases.clear()
    assert pages.pool.used == 0


def test_page_being_copied_outlives_its_session() -> None:
    pages = pages_of(20)
    first = reserve(pages, 40, 0)
    session = pages.keep_session(first, 40, "me", 10.0, now=0.0)
    first.end()
    second = reserve(pages, 1, 1, session_id=session.session_id)
    pages.leases.clear()
    assert second.copy_in is not None
    source, target = second.copy_in
    assert pages.pool._references[source] == pages.pool._references[target] == 1
    others = pages.pool.allocate(pages.pool.free)
    assert source not in others and target not in others
    pages.pool.release(others)
    second.end()
    assert pages.pool.used == 0


def test_pages_of_an_ended_request_are_freed_after_their_last_use() -> None:
    pages = pages_of(20)
    freed = []
    held = reserve(pages, 40, 8)
    held.on_free = lambda: freed.append(pages.pool.used)
    with held.use() as outer:
        with held.use() as inner:
            assert inner == outer == held.table and len(held.table) == 3
            held.end()
            with held.use() as late:
                assert late is None, "what has ended is written to by nobody new"
        assert pages.pool.used == 3 and not held.freed.is_set()
    assert held.freed.is_set() and freed == [0]
    held.end()
    assert freed == [0]


def test_session_of_whole_pages_copies_none_and_outlives_its_request() -> None:
    pages = pages_of(20)
    first = reserve(pages, 32, 0)
    session = pages.keep_session(first, 32, "me", 10.0, now=0.0)
    first.end()
    assert pages.pool.used == 2
    second = reserve(pages, 1, 1, session_id=session.session_id)
    assert second.table[:2] == session.pages and second.copy_in is None
    pages.leases.expire(10.0)
    assert pages.pool.used == 3
    second.end()
    assert pages.pool.used == 0


def test_reservation_is_too_large_if_a_session_page_copy_does_not_fit() -> None:
    pages = pages_of(4)
    first = reserve(pages, 40, 0)
    session = pages.keep_session(first, 40, "me", 10.0, now=0.0)
    first.end()
    assert isinstance(reserve(pages, 1, 7, session_id=session.session_id), RequestPages)
    refused = pages.reserve(
        Reservation(request_id="r", owner="me", new_tokens=1, max_tokens=8, session_id=session.session_id),
        now=0.0,
    )
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.TOO_LARGE


def test_page_for_a_session_copy_is_reserved_or_refused_up_front() -> None:
    pages = pages_of(3)
    held = reserve(pages, 33, 1)
    pages.prepare_session(held, 32)
    assert held.copy_out is None
    with pytest.raises(OutOfPages):
        pages.prepare_session(held, 33)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 70), st.integers(0, 40), st.booleans(), st.integers(0, 9), st.booleans()),
        max_size=25,
    )
)
def test_any_order_of_requests_and_sessions_returns_every_page(steps: list[tuple[Any, ...]]) -> None:
    pages = pages_of(24)
    now, holdings, known = 0.0, [], [""]
    for prompt, new, keep, at, end in steps:
        session = known[at % len(known)] or None
        keep_tokens = prompt if keep and session is None else 0
        answer = pages.reserve(
            Reservation(
                request_id="r",
                owner="me",
                new_tokens=prompt,
                max_tokens=new,
                session_id=session,
                keep_tokens=keep_tokens,
            ),
            now,
        )
        now += 1.0
        if isinstance(answer, Refused):
            continue
        writable = answer.table[answer.held_tokens // 16 :] + answer.spare
        assert all(pages.pool._references[page] == 1 for page in writable), (
            "a shared page must not be written"
        )
        if keep_tokens:
            pages.prepare_session(answer, keep_tokens)
            known.append(pages.keep_session(answer, keep_tokens, "me", 5.0, now).session_id)
        holdings.append(answer)
        if end:
            holdings.pop(0).end()
    for held in holdings:
        held.end()
    pages.leases.clear()
    assert pages.pool.used == 0


# --- arrivals -------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.data())
def test_kv_arrival_tracking_equals_brute_force(layers: int, tokens: int, data: st.DataObject) -> None:
    arrival, seen = KVArrival(range(layers), tokens), set()
    claimed: dict[int, set[tuple[int, int]]] = {layer: set() for layer in range(layers)}
    ranges = st.tuples(st.integers(-1, layers), st.integers(-1, tokens), st.integers(0, tokens + 1))
    for layer, start, count in data.draw(st.lists(ranges, max_size=30)):
        cells = {(layer, token) for token in range(start, start + count)}
        outside = not (0 <= layer < layers and start >= 0 and 0 < count <= tokens - start)
        if outside or (cells & seen and (start, count) not in claimed[layer]):
            with pytest.raises(ArrivalError):
                arrival.claim(layer, start, count)
        elif arrival.claim(layer, start, count):
            assert not cells & seen
            claimed[layer].add((start, count))
            seen |= cells
            arrival.written(layer, start, count)
        else:
            assert (start, count) in claimed[layer]
        assert arrival._count == len(seen)
        assert arrival.complete == (len(seen) == layers * tokens)
