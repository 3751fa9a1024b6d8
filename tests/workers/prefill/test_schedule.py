"""Compares the chunk schedule with brute force, and checks its guarantees in a simulated pipeline."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.prefill.group import schedule
from deltafront.workers.prefill.group.schedule import Waiting
from deltafront.workers.turns import Turns

AGEING = 256.0
CHUNK = 512
times = st.floats(0, 1e4, allow_nan=False)


@given(
    st.lists(
        st.builds(
            Waiting,
            request_id=st.text("abc", min_size=1, max_size=4),
            remaining=st.integers(1, 600_000),
            arrived=times,
            idle_since=st.none() | times,
            credit=st.floats(0, 1e5),
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda w: w.request_id,
    ),
    times,
    st.floats(0, 1e3),
)
def test_next_request_equals_brute_force(waiting: list[Waiting], now: float, ageing: float) -> None:
    def rank(w: Waiting) -> float:
        idle = 0.0 if w.idle_since is None else max(0.0, now - w.idle_since)
        return w.remaining - w.credit - ageing * idle

    waiting = [replace(w, opened=True) for w in waiting]
    chosen = schedule.next_request(waiting, now, ageing, 0)
    (picked,) = [w for w in waiting if w.request_id == chosen]
    for other in waiting:
        assert rank(picked) <= rank(other) or rank(picked) == pytest.approx(rank(other))
        if rank(other) == rank(picked):
            assert (picked.arrived, picked.request_id) <= (other.arrived, other.request_id)
    assert schedule.next_request(list(reversed(waiting)), now, ageing, 0) == chosen


tiers = st.sampled_from(ServiceTier)


@given(
    st.lists(
        st.builds(
            Waiting,
            request_id=st.text("abc", min_size=1, max_size=4),
            remaining=st.integers(1, 9000),
            arrived=times,
            idle_since=times,
            pages=st.integers(1, 9),
            opened=st.booleans(),
        ),
        max_size=8,
        unique_by=lambda w: w.request_id,
    ),
    times,
    st.integers(0, 9),
    tiers,
)
def test_single_service_tier_is_scheduled_as_if_without_tiers(
    waiting: list[Waiting], now: float, free: int, tier: ServiceTier
) -> None:
    mine = [replace(w, tier=tier) for w in waiting]
    order = Turns().order(w.tier for w in mine)
    found = schedule.next_of_tiers(mine, order, now, AGEING, free)
    assert found == schedule.next_request(waiting, now, AGEING, free)


def test_tier_that_lacks_pages_lets_others_only_continue() -> None:
    large = schedule.arrival("large", 900, 0.0, pages=9, tier=ServiceTier.DEFAULT)
    begun = schedule.chunk_sent(
        schedule.arrival("begun", 900, 0.0, pages=1, tier=ServiceTier.FLEX), 100, 0.0, AGEING
    )
    small = schedule.arrival("small", 100, 0.0, pages=1, tier=ServiceTier.FLEX)
    order = [ServiceTier.DEFAULT, ServiceTier.FLEX]
    assert schedule.next_of_tiers([large, small], order, 0.0, AGEING, 8) is None
    assert schedule.next_of_tiers([large, small, begun], order, 0.0, AGEING, 8) == "begun"
    assert schedule.next_of_tiers([large, small, begun], order, 0.0, AGEING, 9) == "large"
    assert schedule.next_of_tiers([large, small], order[::-1], 0.0, AGEING, 8) == "small", "its turn"


@given(st.lists(st.tuples(tiers, st.integers(1, 40)), min_size=1, max_size=40), st.integers(40, 60))
def test_every_prompt_ends_and_tiers_get_chunks_by_weight(
    prompts: list[tuple[ServiceTier, int]], pages: int
) -> None:
    """Prompts of so many pages of 16 tokens run in chunks of four pages at most. While all tiers wait, the
    shares differ from the weights by at most a chunk."""
    waiting = {
        f"{number:02}": schedule.arrival(f"{number:02}", 16 * size, 0.0, size, tier)
        for number, (tier, size) in enumerate(prompts)
    }
    turns, free, now, given = Turns(), pages, 0.0, dict.fromkeys(ServiceTier, 0)
    roomy = sum(size for _, size in prompts) <= pages
    every = {tier for tier, _ in prompts}
    while waiting:
        left = {entry.tier for entry in waiting.values()}
        chosen = schedule.next_of_tiers(waiting.values(), turns.order(left), now, AGEING, free)
        assert chosen is not None, "something can always run"
        entry = waiting[chosen]
        tokens = min(64, entry.remaining)
        free -= 0 if entry.opened else entry.pages
        turns.give(entry.tier, tokens, left)
        now += 1.0
        waiting[chosen] = schedule.became_idle(schedule.chunk_sent(entry, tokens, now, AGEING), now)
        given[entry.tier] += tokens
        if not waiting[chosen].remaining:
            free += waiting.pop(chosen).pages
        if roomy and left == every:
            passes = [given[tier] / tier.weight for tier in every]
            assert max(passes) - min(passes) <= 64 / min(tier.weight for tier in every)
    assert free == pages


def test_schedules_nothing_without_a_waiting_request_that_fits() -> None:
    assert schedule.next_request([], 0.0, AGEING, 8) is None
    assert schedule.next_request([schedule.arrival("a", 256, 0.0, pages=16)], 0.0, AGEING, 15) is None


def test_waiting_credit_grows_between_chunks_and_chunks_cost_double() -> None:
    waiting = schedule.arrival("a", 2048, now=10.0)
    assert schedule.credit_at(waiting, 20.0, AGEING) == 2560.0
    waiting = schedule.chunk_sent(waiting, CHUNK, 20.0, AGEING)
    assert (waiting.remaining, waiting.credit) == (1536, 1536.0)
    assert schedule.credit_at(waiting, 500.0, AGEING) == 1536.0, "its chunk is running: it does not wait"
    waiting = schedule.chunk_sent(schedule.became_idle(waiting, 30.0), CHUNK, 30.0, AGEING)
    assert waiting.credit == 512.0
    waiting = schedule.chunk_sent(waiting, CHUNK, 31.0, AGEING)
    assert waiting.credit == 0.0, "never in debt"


@dataclass(frozen=True)
class Arrival:
    name: str
    tokens: int
    at: float


def simulate(
    arrivals: Sequence[Arrival], stages: int, chunk_seconds: float, until: float = 1e9
) -> dict[str, float]:
    """Return the end of each prompt in a pipeline of equal stages, with at most `stages` chunks in flight.

    Every chunk takes chunk_seconds / stages on each stage.
    """
    step, ageing = chunk_seconds / stages, schedule.ageing_of(CHUNK / chunk_seconds)
    todo = sorted(arrivals, key=lambda a: a.at)
    waiting: dict[str, Waiting] = {}
    pipeline: list[tuple[str, int]] = []  # (request, stages passed), oldest first
    finished: dict[str, float] = {}
    now = 0.0
    while (todo or waiting or pipeline) and now < until:
        while todo and todo[0].at <= now:
            arrived = todo.pop(0)
            waiting[arrived.name] = schedule.arrival(arrived.name, arrived.tokens, now)
        free_entry = all(passed > 0 for _, passed in pipeline)
        ready = [w for w in waiting.values() if w.remaining > 0]
        if ready and free_entry and len(pipeline) < stages:
            name = schedule.next_request(ready, now, ageing, 0)
            assert name is not None
            tokens = min(CHUNK, waiting[name].remaining)
            waiting[name] = schedule.chunk_sent(waiting[name], tokens, now, ageing)
            pipeline.append((name, 0))
        now += step
        pipeline = [(name, passed + 1) for name, passed in pipeline]
        while pipeline and pipeline[0][1] == stages:
            name, _ = pipeline.pop(0)
            if name not in [other for other, _ in pipeline]:
                waiting[name] = schedule.became_idle(waiting[name], now)
                if waiting[name].remaining == 0:
                    finished[name] = now
                    del waiting[name]
    return finished


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("chunk_seconds", [0.05, 0.4, 3.0])
@pytest.mark.parametrize("document", [8192, 524_288])
def test_short_prompt_waits_for_at_most_two_other_chunks(
    stages: int, chunk_seconds: float, document: int
) -> None:
    short = Arrival("short", 256, 1.0)
    alone = simulate([short], stages, chunk_seconds)["short"]
    shared = simulate([Arrival("document", document, 0.0), short], stages, chunk_seconds, until=60.0)["short"]
    assert shared - alone <= 2 * chunk_seconds + 1e-9


def test_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    """Short prompts fill the pipeline by themselves. The document first ages to the front and then keeps a
    share."""
    seconds = 0.25
    crowd = [Arrival(f"s{i:05d}", 256, i * seconds) for i in range(4000)]
    finished = simulate([Arrival("document", 8192, 0.0), *crowd], 1, seconds, until=1000.0)
    ageing = schedule.ageing_of(CHUNK / seconds)
    assert ageing == AGEING / 2
    earned = 8192 / ageing
    chunks = 8192 / CHUNK
    assert finished["document"] <= earned + chunks * (2 * CHUNK / ageing) + 10.0
    waits = [finished[a.name] - a.at for a in crowd if a.at < finished["document"] and a.name in finished]
    assert max(waits) <= (chunks + 3) * seconds, "it takes its share a chunk at a time"


def test_every_prompt_ends_and_shortest_ends_first_without_ageing() -> None:
    rng = random.Random(3)
    arrivals = [Arrival(f"r{i}", rng.randrange(1, 6000), 0.0) for i in range(20)]
    finished = simulate(arrivals, 2, 0.001)
    order = sorted(finished, key=lambda name: finished[name])
    assert order == [a.name for a in sorted(arrivals, key=lambda a: (a.tokens, a.name))]


@pytest.mark.parametrize("chunk_seconds", [0.01, 0.4, 3.0])
def test_equal_prompts_end_one_after_the_other(chunk_seconds: float) -> None:
    """If they took turns, as they did in slow groups, all would end late."""
    chunks, prompts = 2, 8
    arrivals = [Arrival(f"p{n}", chunks * CHUNK, 0.0) for n in range(prompts)]
    finished = simulate(arrivals, 1, chunk_seconds)
    alone = chunks * chunk_seconds
    assert finished == pytest.approx({f"p{n}": (n + 1) * alone for n in range(prompts)})


def test_waiting_requests_earn_a_share_of_a_slow_groups_rate() -> None:
    assert schedule.ageing_of(0.0) == schedule.ageing_of(1e6) == AGEING
    assert schedule.ageing_of(160.0) == 10.0
