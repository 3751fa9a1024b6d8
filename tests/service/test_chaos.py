"""A short chaos test in this process, with fake workers: random requests and random deaths."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import grpc
import pytest

from deltafront.service.client import retries
from deltafront.service.request.run import attempt

from ..chaos.fuzz import fuzz
from ..chaos.play import play
from ..chaos.references import references
from ..chaos.running import Service
from ..chaos.schedule import ENTRIES, Fault, Form, Kind, episode
from .fakes import Speed
from .inprocess import House
from .test_requests import nothing_left

GROUPS = (Kind.STAGE, Kind.CONTROLLER, Kind.GROUP_OWNER)
SPEED = Speed(chunk=0.001, token=0.001)


@pytest.fixture
def houses(make_house: Callable[..., House]) -> Iterator[tuple[House, House]]:
    first = make_house()
    yield first, make_house(others=[first], metrics=first.metrics)
    nothing_left(first)


def test_fuzzed_requests_never_cause_an_internal_error(houses: tuple[House, House]) -> None:
    findings = fuzz([house.address for house in houses], 400, seed=1, threads=4)
    assert not findings.bad, findings.bad
    assert findings.codes["OK"] > 40 and findings.codes["INVALID_ARGUMENT"] > 100, findings.codes


class Inside(Service):
    """Two doors and two workers of each role, whose connections are cut. A replacement starts at once."""

    def __init__(self, houses: tuple[House, House]) -> None:
        self._houses, self._turn, self._names = houses, itertools.count(), itertools.count(2)
        houses[0].add_group("prefill:g1").speed = SPEED
        houses[0].add_decode("decode:d1").speed = SPEED

    @property
    def address(self) -> str:  # type: ignore[override]
        return self._houses[next(self._turn) % 2].address

    def strike(self, fault: Fault) -> bool:
        house = self._houses[fault.which % 2]
        if fault.kind is Kind.SERVE_CONTROLLER:
            return False
        if fault.kind in ENTRIES:
            house.losses.append((fault.which % 30, grpc.StatusCode.UNKNOWN))
            return True
        groups = fault.kind in GROUPS
        links = house.directory.groups if groups else house.directory.workers
        links.pop(fault.which % len(links)).cut = True  # type: ignore[attr-defined]
        name = next(self._names)
        new = house.add_group(f"prefill:g{name}") if groups else house.add_decode(f"decode:d{name}")
        new.speed = SPEED
        return True

    def scrape(self) -> str:
        return str(self._houses[0].metrics.expose(), "utf-8")


def test_clients_lose_nothing_when_any_worker_or_door_dies(
    houses: tuple[House, House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each seed gives other clients and other deaths."""
    for module in (retries, attempt):
        monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.01)
    service = Inside(houses)
    known, struck = references(service), set[Kind]()
    for seed in range(10):
        for house in houses:
            house.losses.clear()
        drawn = episode(seed, 6, stops=False)
        asks = tuple(ask for ask in drawn.asks if ask.form is not Form.HTTP)
        outcome = play(service, type(drawn)(seed, asks, drawn.faults), known)
        assert not outcome.problems, (seed, outcome)
        struck |= {fault.kind for fault in outcome.faults}
    assert {Kind.DOOR, Kind.DECODE} < struck and struck & set(GROUPS)
