"""The services for `make chaos`, and its options for amount and seed.

Without --chaos only tests of pure functions run. tests/service/test_chaos.py is a short chaos test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from . import results
from .inside import running_inside
from .results import Row
from .running import Service, running


@dataclass(frozen=True)
class Amount:
    """How much to run: number of kills, minutes of the soak, tries of every other case (0: the case's
    default). budget_s: seconds after which a case begins no further try. add: add to the results in
    chaos.json."""

    seed: int
    kills: int
    minutes: float
    tries: int
    budget_s: float
    add: bool
    inside: bool


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--chaos", action="store_true", help="the long form, against a real service")
    group.addoption("--chaos-seed", type=int, default=1)
    group.addoption("--chaos-kills", type=int, default=200)
    group.addoption("--chaos-minutes", type=float, default=60.0, help="of the soak")
    group.addoption("--chaos-tries", type=int, default=0, help="of every other case; 0: each case's own")
    group.addoption("--chaos-budget", type=float, default=1e9, help="seconds; then no further try begins")
    group.addoption("--chaos-inside", action="store_true", help="in one process, where nothing can be killed")
    group.addoption("--chaos-mapped", action="store_true", help="handoff.transport: mapped, one of each role")
    group.addoption("--chaos-tiers", action="store_true", help="remember below the pages: host memory, disk")
    group.addoption("--chaos-add", action="store_true", help="add to the rows of chaos.json")


@pytest.fixture(scope="session")
def amount(request: pytest.FixtureRequest) -> Amount:
    option = request.config.getoption
    if not option("--chaos", default=False):
        pytest.skip("the long form: make chaos")
    return Amount(
        option("--chaos-seed"),
        option("--chaos-kills"),
        option("--chaos-minutes"),
        option("--chaos-tries"),
        option("--chaos-budget"),
        option("--chaos-add"),
        option("--chaos-inside"),
    )


_FORMS = ("mapped", "tiers")
"""Variants of the service, whose names are prefixes of result rows."""
MAPPED: dict[str, dict[str, Any]] = {
    "prefill": {"groups": 1, "stages": 1},
    "decode": {"workers": 1, "tensor_parallel": 1},
    "handoff": {"transport": "mapped"},
}
TIERS = {"cache_tokens": 8192, "max_wait_s": 120.0, "host_cache_gib": 0.1, "store_gib": 0.15}
"""Pages for two long prompts and host memory for several, so that blocks are evicted and loaded."""


class Switch:
    """Runs one service at a time, because all use the same ports."""

    def __init__(self, folders: pytest.TempPathFactory, inside: bool) -> None:
        self._folders, self._inside = folders, inside
        self._name = ""
        self._stack = ExitStack()
        self._running: Service | None = None

    def to(self, name: str, **sections: dict[str, Any]) -> Service:
        """Return the service with that name, and start it unless it runs. sections: changes of its
        configuration."""
        if self._running is None or name != self._name:
            self.off()
            start = running_inside if self._inside else running
            self._running = self._stack.enter_context(start(self._folders.mktemp(name), **sections))
            self._name = name
        return self._running

    def off(self) -> None:
        self._running = None
        self._stack.close()


@pytest.fixture(scope="session")
def switch(amount: Amount, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Switch]:
    made = Switch(tmp_path_factory, amount.inside)
    yield made
    made.off()


@pytest.fixture
def tiers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With --chaos-tiers, configure host memory and files for the prefix cache."""
    if not request.config.getoption("--chaos-tiers"):
        return {}
    return {**TIERS, "store": str(tmp_path_factory.getbasetemp() / "store")}


@pytest.fixture
def service(switch: Switch, request: pytest.FixtureRequest, tiers: dict[str, Any]) -> Service:
    """A service with two of everything; with --chaos-mapped, one stage that maps one decode worker's
    memory."""
    option = request.config.getoption
    name = "_".join(one for one in _FORMS if option(f"--chaos-{one}")) or "whole"
    sections = {key: dict(keys) for key, keys in MAPPED.items()} if option("--chaos-mapped") else {}
    if tiers:
        sections["decode"] = {**sections.get("decode", {}), **tiers}
        if "prefill" in sections:
            sections["prefill"]["cache_tokens"] = TIERS["cache_tokens"]
    return switch.to(name, **sections)


@pytest.fixture
def alone(switch: Switch, tiers: dict[str, Any]) -> Service:
    """A service with two doors but no spare workers: one group with a short queue, and one decode worker. Its
    prefix cache is off without --chaos-tiers."""
    sections: dict[str, dict[str, Any]] = {
        "prefill": {"groups": 1, "max_waiting": 4, "cache_tokens": 4096},
        "decode": {**tiers, "workers": 1, "cache_tokens": 8192},
        "door": {"prefix_reuse": bool(tiers)},
    }
    return switch.to("alone", **sections)


Record = Callable[..., None]


@pytest.fixture(scope="session")
def record(amount: Amount, request: pytest.FixtureRequest) -> Record:
    """Return the function that writes a row of chaos.json: record(case, tries, bad, note, add)."""

    def write(case: str, tries: int, bad: int, note: str = "", add: bool = amount.add) -> None:
        case = "".join(f"{one}_" for one in _FORMS if request.config.getoption(f"--chaos-{one}")) + case
        where = "in one process" if amount.inside else ""
        row = Row(case, tries, bad, "; ".join(filter(None, (note, where))))
        print(row, flush=True)
        results.write(row, add)

    return write
