"""The learned order of eviction against least recently used and against Belady's, on small traces."""

from __future__ import annotations

import random

from deltafront.benchmarks.eviction import Trace, Uses, chats, found_in_order, learned, sessions, share

PAGE = 512
"""Tokens of a page of sessions here."""


def shares(trace: Trace, pages: int, kind: str) -> tuple[float, float, float]:
    """Return the found shares: least recently used, learned, known."""
    uses = Uses(trace)
    orders = (
        found_in_order(trace, pages, uses.since_last),
        learned(trace, pages),
        found_in_order(trace, pages, uses.until_next),
    )
    least, mine, known = (share(trace, found, kind) for found in orders)
    return least, mine, known


def test_policy_hits_far_more_than_lru_if_sessions_do_not_fit() -> None:
    for seed in range(3):
        trace = sessions(random.Random(seed), 16, 0.3, PAGE)
        least, mine, known = shares(trace, 327_680 // PAGE, "session")
        assert least + 0.15 < mine < known, seed


def test_hit_rate_of_short_chats_is_at_most_3_points_below_lru() -> None:
    for seed in range(2):
        trace = chats(random.Random(seed), 2.0, 300.0)
        for pages in (3_000, 12_000):
            least, mine, known = shares(trace, pages, "chat")
            assert least - 0.03 < mine < known, (seed, pages)


def test_every_policy_has_the_same_hit_rate_if_all_sessions_fit() -> None:
    trace = sessions(random.Random(0), 4, 0.3, PAGE)
    least, mine, known = shares(trace, 4 * 105_000 // PAGE, "session")
    assert least == mine == known


def test_times_of_last_and_next_use_equal_those_in_the_trace() -> None:
    trace = sessions(random.Random(1), 2, 0.3, PAGE)
    uses, turn = Uses(trace), trace[5]
    name = turn.conversation
    own = [one.at for one in trace if one.conversation == name]
    now = turn.at + 0.001
    assert uses.since_last(name, now) == now - turn.at
    assert uses.until_next(name, now) == min(at for at in own if at > now) - now
