"""A caller's limits a minute, on a clock that the tests set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.service.request.callers import Caller, Quota
from deltafront.service.request.rates import RateLimited, RateLimits, RateState


class Minute:
    """Rate limits, and the time of their clock in seconds."""

    def __init__(self, doors: int = 1) -> None:
        self.now = 0.0
        self.rates = RateLimits(doors, lambda: self.now)

    def refused(self, caller: Caller) -> float:
        """Begin a request, and return the seconds to wait; 0 if it was permitted."""
        try:
            self.rates.begin(caller)
        except RateLimited as error:
            assert error.retry_after_s is not None
            return error.retry_after_s
        return 0.0


def caller(requests: int | None = None, tokens: int | None = None, owner: str = "a") -> Caller:
    return Caller(owner, owner, Quota(requests_per_minute=requests, tokens_per_minute=tokens))


def test_refuses_requests_over_the_limit_until_one_is_forgotten() -> None:
    minute, ann = Minute(), caller(requests=5)
    assert [minute.refused(ann) for _ in range(5)] == [0.0] * 5
    with pytest.raises(
        RateLimited, match=r"^5 requests a minute for this caller: try again in 12 s$"
    ) as over:
        minute.rates.begin(ann)
    assert over.value.states == (RateState("requests", 5, 0, 60.0),)
    assert not minute.refused(caller(requests=5, owner="b")), "another caller has its own limit"
    minute.now = 11.0
    assert minute.refused(ann) == pytest.approx(1.0)
    minute.now = 12.0
    assert not minute.refused(ann)
    assert minute.refused(ann) == pytest.approx(12.0)


def test_prompt_above_the_limit_of_tokens_makes_later_requests_wait() -> None:
    minute, ann = Minute(), caller(tokens=1000)
    assert not minute.refused(ann)
    minute.rates.spend(ann, 4999)
    minute.rates.spend(ann, 1)
    with pytest.raises(RateLimited, match=r"^1000 tokens a minute for this caller: try again in 241 s$"):
        minute.rates.begin(ann)
    minute.now = 240.06
    assert not minute.refused(ann)
    minute.now = 270.0
    assert minute.rates.states(ann) == (RateState("tokens", 1000, 500, pytest.approx(30.0)),)


def test_each_door_permits_an_equal_share_and_at_least_one_request() -> None:
    minute, ann = Minute(doors=2), caller(requests=4)
    assert [minute.refused(ann) for _ in range(2)] == [0.0] * 2
    with pytest.raises(RateLimited, match=r"^4 requests a minute for this caller \(2 at each of 2 doors\)"):
        minute.rates.begin(ann)
    rare = caller(requests=1, owner="rare")
    assert not minute.refused(rare)
    assert minute.refused(rare) == pytest.approx(120.0)


def test_caller_without_limits_is_never_refused_or_remembered() -> None:
    minute, ann = Minute(), caller()
    for _ in range(1000):
        minute.rates.begin(ann)
        minute.rates.spend(ann, 1 << 20)
    assert minute.rates.states(ann) == ()
    assert not minute.rates._uses


@given(
    limit=st.integers(1, 100),
    doors=st.integers(1, 4),
    pauses=st.lists(st.floats(0.0, 30.0), max_size=80),
)
def test_requests_stay_below_the_limit_in_any_time(limit: int, doors: int, pauses: list[float]) -> None:
    """In t seconds a door permits its share at once, and what is forgotten in t seconds. A client that waits
    as long as it is told is permitted."""
    minute, ann, begun = Minute(doors), caller(requests=limit), list[float]()
    for pause in pauses:
        minute.now += pause
        if wait_s := minute.refused(ann):
            minute.now += wait_s
            assert not minute.refused(ann)
        begun.append(minute.now)
    share = limit / doors
    for first, start in enumerate(begun):
        for last, end in enumerate(begun[first:], first):
            assert last - first + 1 <= max(1.0, share) + (end - start) * share / 60 + 1e-3
