"""Retries after a lost connection, with clocks that the test moves."""

from __future__ import annotations

import pytest

from deltafront.service.client.retries import Retries
from deltafront.service.errors import (
    ConnectionLost,
    DeadlineExceeded,
    DeltafrontError,
    Internal,
    Overloaded,
    Unavailable,
)

LOST = ConnectionLost("gone")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def wait(self, retries: Retries, error: DeltafrontError) -> None:
        self.sleep(retries.pause_s(error))

    def retries(self, retry_s: float = 10.0, deadline: float | None = None) -> Retries:
        return Retries(retry_s, deadline, clock=lambda: self.now, wall=lambda: self.now)


def test_retry_pauses_grow_until_retry_s_is_over() -> None:
    clock = Clock()
    retries = clock.retries()
    with pytest.raises(ConnectionLost):
        while True:
            clock.wait(retries, LOST)
    assert clock.slept == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0])
    assert sum(clock.slept) <= 10


def test_received_event_resets_the_retry_time() -> None:
    clock = Clock()
    retries = clock.retries(retry_s=1.0)
    for _ in range(20):
        clock.wait(retries, LOST)
        retries.reset()
    assert clock.slept == [0.1] * 20


@pytest.mark.parametrize("error", [Internal("x"), Unavailable("x"), Overloaded("x", retry_after_s=1.0)])
def test_errors_from_the_service_are_not_retried(error: DeltafrontError) -> None:
    clock = Clock()
    with pytest.raises(type(error)):
        clock.wait(clock.retries(), error)
    assert not clock.slept


def test_retries_overloaded_after_a_lost_connection() -> None:
    clock = Clock()
    retries = clock.retries()
    clock.wait(retries, LOST)
    clock.wait(retries, Overloaded("full", retry_after_s=3.0))
    assert clock.slept == [0.1, 3.0]
    with pytest.raises(Overloaded):
        clock.wait(retries, Overloaded("too large for ever"))


def test_callers_deadline_bounds_the_retries() -> None:
    clock = Clock()
    retries = clock.retries(deadline=clock.now + 0.5)
    with pytest.raises(DeadlineExceeded, match="gone"):
        while True:
            clock.wait(retries, LOST)
    assert sum(clock.slept) < 0.5


def test_retry_s_of_0_never_retries() -> None:
    with pytest.raises(ConnectionLost):
        Clock().retries(retry_s=0).pause_s(LOST)
