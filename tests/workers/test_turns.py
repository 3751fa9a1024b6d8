"""Compares turns of service tiers with brute force, and checks shares and waits."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.turns import Turns

MOST = 1 << 12
units = st.integers(1, MOST)
every = list(ServiceTier)


@given(st.lists(units, max_size=100))
def test_turns_of_always_waiting_tiers_equal_brute_force(sizes: list[int]) -> None:
    """Each turn is of the tier that was given least for its weight. Shares stay within one prompt's size."""
    turns, given_to = Turns(), dict.fromkeys(every, 0)
    for size in sizes:
        least = min(every, key=lambda tier: (Fraction(given_to[tier], tier.weight), tier.rank))
        assert turns.order(every)[0] is least
        turns.give(least, size, every)
        given_to[least] += size
        for one in every:
            for other in every:
                ahead = given_to[one] / one.weight - given_to[other] / other.weight
                assert ahead <= MOST / one.weight


@given(st.lists(st.tuples(units, st.sets(st.sampled_from(every))), max_size=100), st.sampled_from(every))
def test_no_tier_waits_for_ever(steps: list[tuple[int, set[ServiceTier]]], patient: ServiceTier) -> None:
    """While a tier waits, each other tier gets at most its share of one prompt, and one prompt more."""
    turns, others = Turns(), dict.fromkeys(every, 0)
    for size, more in steps:
        waiting = more | {patient}
        chosen = turns.order(waiting)[0]
        turns.give(chosen, size, waiting)
        others[chosen] += size
        if chosen is patient:
            others = dict.fromkeys(every, 0)
        for tier in set(every) - {patient}:
            assert others[tier] <= MOST * tier.weight / patient.weight + MOST


def test_tier_earns_nothing_while_it_does_not_wait() -> None:
    turns, alone = Turns(), [ServiceTier.FLEX]
    for _ in range(1000):
        assert turns.order(alone) == alone
        turns.give(ServiceTier.FLEX, 10, alone)
    both = [ServiceTier.DEFAULT, ServiceTier.FLEX]
    counts = dict.fromkeys(both, 0)
    for _ in range(100):
        tier = turns.order(both)[0]
        turns.give(tier, 10, both)
        counts[tier] += 1
    assert counts == {ServiceTier.DEFAULT: 81, ServiceTier.FLEX: 19}, "4 : 1, but for the prompt before"
