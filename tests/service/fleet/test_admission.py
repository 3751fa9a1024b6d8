"""Compares admission with brute force, and checks its properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.service.fleet.admission import (
    Admitted,
    Need,
    Reason,
    Rejected,
    admit,
    predicted_ttft,
)
from deltafront.tests.states import decode_stats, group_stats
from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.messages.states import DecodeStats, GroupStats, PrefillCost

rates = st.one_of(st.just(0.0), st.floats(1.0, 1e5))
small = st.integers(0, 40)


@st.composite
def group(draw: st.DrawFn, name: str = "g") -> GroupStats:
    total = draw(st.integers(1, 40))
    free = draw(st.integers(0, total))
    return group_stats(
        name,
        pages_total=total,
        pages_free=free,
        running=draw(small),
        waiting=draw(st.integers(0, 8)),
        waiting_tokens=draw(st.integers(0, 5000)),
        tokens_per_second=draw(rates),
    )


@st.composite
def worker(draw: st.DrawFn, name: str = "d") -> DecodeStats:
    total = draw(st.integers(1, 40))
    return decode_stats(
        name,
        pages_total=total,
        pages_free=draw(st.integers(0, total)),
        running=draw(small),
        waiting=draw(small),
        sessions=draw(small),
    )


groups = st.integers(1, 4).flatmap(lambda n: st.tuples(*(group(f"g{i}") for i in range(n))))
workers = st.integers(1, 4).flatmap(lambda n: st.tuples(*(worker(f"d{i}") for i in range(n))))
needs = st.builds(
    Need,
    st.integers(1, 500),
    st.integers(0, 300),
    st.one_of(st.none(), st.floats(0.001, 100.0)),
    st.integers(0, 200),
)


def brute(need: Need, gs: tuple[GroupStats, ...], ws: tuple[DecodeStats, ...]) -> set[tuple[str, str]]:
    """Find every (group, worker) pair on which the request could run in time, once the worker has free
    pages."""
    pairs = set()
    for g in gs:
        for w in ws:
            pages = 0
            while pages * w.page_tokens < need.prefill_tokens + need.answer_tokens + need.recompute_tokens:
                pages += 1
            holds = pages <= w.pages_total and need.prefill_tokens <= g.pages_total * w.page_tokens
            seconds = (
                (g.waiting_tokens + need.prefill_tokens) / g.tokens_per_second if g.tokens_per_second else 0
            )
            in_time = need.seconds_left is None or seconds <= need.seconds_left
            if holds and in_time:
                pairs.add((g.name, w.name))
    return pairs


@given(needs, groups, workers)
def test_admits_only_groups_and_workers_that_fit_the_prompt(
    need: Need, gs: tuple[GroupStats, ...], ws: tuple[DecodeStats, ...]
) -> None:
    decision = admit(need, gs, ws)
    possible = brute(need, gs, ws)
    if isinstance(decision, Admitted):
        assert decision.workers
        assert {(group, name) for group in decision.groups for name in decision.workers} == possible
        free = {w.name: w.pages_free for w in ws}
        assert [free[name] for name in decision.workers] == sorted(
            (free[name] for name in decision.workers), reverse=True
        )
    elif decision.reason is Reason.TOO_LARGE:
        assert not possible


def test_prefers_a_decode_worker_near_the_stages_if_it_has_room() -> None:
    """A near worker is ranked as if a quarter of its pages were free in addition, unless it is full."""
    g = group_stats(pages_total=1000, pages_free=1000, nodes=("n1", "n2"))
    far = decode_stats("far", pages_free=80, node="n3")

    def order(free: int) -> tuple[str, ...]:
        decision = admit(Need(160), (g,), (far, replace(far, name="near", pages_free=free, node="n2")))
        assert isinstance(decision, Admitted)
        return decision.workers

    assert order(80) == order(60) == ("near", "far")
    assert order(50) == ("far", "near")
    full = replace(far, name="full", pages_free=5)
    near_full = replace(full, name="near-full", pages_free=9, node="n1")
    decision = admit(Need(160), (g,), (near_full, full, replace(far, pages_free=10)))
    assert isinstance(decision, Admitted) and decision.workers == ("far", "near-full", "full")
    unknown = admit(Need(160), (replace(g, nodes=()),), (far, replace(far, name="near", node="")))
    assert isinstance(unknown, Admitted) and unknown.workers == ("far", "near"), "no node is like no other"


def test_draining_workers_get_no_new_requests() -> None:
    staying, leaving = (
        group_stats(waiting_tokens=900, tokens_per_second=10.0),
        group_stats("h", tokens_per_second=10.0),
    )
    ws = (
        decode_stats(pages_free=10),
        decode_stats("e", draining=True),
    )
    decision = admit(Need(160), (staying, replace(leaving, draining=True)), ws)
    assert isinstance(decision, Admitted)
    assert (decision.groups, decision.workers) == (("g",), ("d",))


def test_draining_workers_get_requests_if_all_drain() -> None:
    """A worker may begin to drain before its replacement has loaded."""
    g = group_stats(tokens_per_second=10.0, draining=True)
    ws = tuple(decode_stats(name, pages_free=free, draining=True) for name, free in (("d", 40), ("e", 90)))
    decision = admit(Need(160), (g,), ws)
    assert isinstance(decision, Admitted)
    assert (decision.groups, decision.workers) == (("g",), ("e", "d"))


@given(needs, group(), workers)
def test_with_one_group_admission_equals_brute_force(
    need: Need, g: GroupStats, ws: tuple[DecodeStats, ...]
) -> None:
    decision = admit(need, (g,), ws)
    possible = {name for _group, name in brute(need, (g,), ws)}
    assert set(decision.workers if isinstance(decision, Admitted) else ()) == possible


@given(needs, groups, workers)
def test_outdated_state_of_full_workers_refuses_no_request(
    need: Need, gs: tuple[GroupStats, ...], ws: tuple[DecodeStats, ...]
) -> None:
    """The door's view may be old, so only a worker may refuse for lack of pages."""
    full = tuple(replace(w, pages_free=0) for w in ws)
    decision, roomy = admit(need, gs, full), admit(need, gs, ws)
    assert isinstance(decision, Admitted) == isinstance(roomy, Admitted)
    if isinstance(decision, Admitted) and isinstance(roomy, Admitted):
        assert set(decision.workers) == set(roomy.workers)


@given(needs, groups, workers)
def test_admission_chooses_the_least_loaded_prefill_group(
    need: Need, gs: tuple[GroupStats, ...], ws: tuple[DecodeStats, ...]
) -> None:
    gs = tuple(replace(g, tokens_per_second=100.0, waiting=0) for g in gs)
    ws = (*ws, decode_stats("roomy", pages_total=1000, pages_free=1000))
    need = replace(need, seconds_left=None)
    able = [g for g in gs if need.prefill_tokens <= g.pages_total * 16]
    decision = admit(need, gs, ws)
    assert isinstance(decision, Admitted) == bool(able)
    if isinstance(decision, Admitted):
        chosen = next(g for g in gs if g.name == decision.groups[0])
        assert chosen.waiting_tokens == min(g.waiting_tokens for g in able)
        expected_s = predicted_ttft(need, chosen)
        assert expected_s == pytest.approx((chosen.waiting_tokens + need.prefill_tokens) / 100.0)


@given(needs, groups, workers)
def test_refusal_has_a_retry_time_only_if_waiting_helps(
    need: Need, gs: tuple[GroupStats, ...], ws: tuple[DecodeStats, ...]
) -> None:
    decision = admit(need, gs, ws)
    idle_groups = tuple(replace(g, waiting=0, waiting_tokens=0, pages_free=g.pages_total) for g in gs)
    idle_workers = tuple(replace(w, pages_free=w.pages_total) for w in ws)
    if isinstance(decision, Rejected):
        if decision.retry_after_s is None:
            assert decision.reason in (Reason.TOO_LARGE, Reason.TOO_SLOW)
        else:
            assert decision.retry_after_s >= 1
        if decision.reason is Reason.TOO_LARGE:
            assert not brute(replace(need, seconds_left=None), idle_groups, idle_workers)


def test_predicts_no_ttft_without_a_measured_prefill_rate() -> None:
    idle = group_stats(pages_total=10, pages_free=10, waiting_tokens=300)
    assert predicted_ttft(Need(100), idle) is None
    assert predicted_ttft(Need(100), replace(idle, tokens_per_second=200.0)) == 2.0


def test_ttft_prediction_includes_length_cached_tokens_and_queue() -> None:
    cost = PrefillCost(token_s=1e-4, pair_s=1e-8, chunk_s=0.01, chunk_tokens=1000)
    busy = group_stats(
        waiting_tokens=12_000,
        tokens_per_second=1.0,
        costs=(("dense", cost),),
        queue=((10_000, 2.0, ServiceTier.DEFAULT), (2_000, 0.5, ServiceTier.DEFAULT)),
    )
    whole = 0.05 + 0.5 + 1e-8 * 5000 * 5000 / 2
    assert predicted_ttft(Need(5000, method="dense"), busy) == pytest.approx(whole + 0.5)
    rest = 0.01 + 0.1 + 1e-8 * 1000 * (4000 + 5000) / 2
    found = Need(5000, found_tokens=4000, method="dense")
    assert predicted_ttft(found, busy) == pytest.approx(rest), "it overtakes both"
    other = predicted_ttft(Need(5000, method="dpxa"), busy)
    assert other == pytest.approx(5000.5), "a method that was not measured goes by the rate"


def test_ttft_prediction_shares_the_group_among_tiers_by_weight() -> None:
    cost = PrefillCost(token_s=1e-3)
    queue = ((2000, 2.0, ServiceTier.DEFAULT), (0, 0.5, ServiceTier.FLEX), (9000, 9.0, ServiceTier.PRIORITY))
    busy = group_stats(waiting_tokens=11_000, tokens_per_second=1000.0, costs=(("dense", cost),), queue=queue)

    def ttft(tier: ServiceTier) -> float | None:
        return predicted_ttft(Need(4000, method="dense", tier=tier), busy)

    assert ttft(ServiceTier.DEFAULT) == pytest.approx(0.5 + 2.0 + 4.0 + 9.0), "all of the better tier"
    assert ttft(ServiceTier.PRIORITY) == pytest.approx(0.5 + 4.0 + 4.5 / 4), "its longer prompt waits, too"
    assert ttft(ServiceTier.FLEX) == pytest.approx(0.5 + 4.0 + 2.0 + 9.0)


def test_idle_group_with_a_slow_measured_rate_still_admits_requests() -> None:
    """One prefill may be slow because kernels are compiled. If later deadlines were refused, the slow rate
    would stay forever."""
    slow = group_stats(pages_total=1000, pages_free=1000, tokens_per_second=100.0)
    roomy = decode_stats(pages_total=1000, pages_free=1000)
    need = Need(6000, 0, 30.0)
    assert isinstance(admit(need, (replace(slow, idle_s=59.0),), (roomy,)), Rejected)
    assert isinstance(admit(need, (replace(slow, idle_s=60.0),), (roomy,)), Admitted)


def test_retry_time_is_when_the_deadline_could_be_met() -> None:
    busy = group_stats(running=1, waiting=1, waiting_tokens=1000, tokens_per_second=100.0)
    roomy = decode_stats()
    decision = admit(Need(200, 0, 5.0), (busy,), (roomy,))
    assert isinstance(decision, Rejected)
    assert (decision.reason, decision.retry_after_s) == (Reason.BACKLOG, 7.0)
    slow = admit(Need(600, 0, 5.0), (busy,), (roomy,))
    assert isinstance(slow, Rejected)
    assert (slow.reason, slow.retry_after_s) == (Reason.TOO_SLOW, None)
