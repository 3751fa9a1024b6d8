"""The service under attack, and what `make chaos` is told: how much, and from which seed.

Without --chaos only what is pure runs here; the short form is tests/service/test_chaos.py.
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
    """kills; minutes of the soak; tries of every other case, 0 for its own number. budget_s: after so many
    seconds no further try of a case begins. add: to what chaos.json has."""

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
"""Forms of the service, which name its rows."""
MAPPED: dict[str, dict[str, Any]] = {
    "prefill": {"groups": 1, "stages": 1},
    "decode": {"workers": 1, "tensor_parallel": 1},
    "handoff": {"transport": "mapped"},
}
TIERS = {"cache_tokens": 8192, "max_wait_s": 120.0, "host_cache_gib": 0.1, "store_gib": 0.15}
"""Pages for two long prompts, host memory for several, so that prompts come and go."""


class Switch:
    """One service at a time: their ports are the same."""

    def __init__(self, folders: pytest.TempPathFactory, inside: bool) -> None:
        self._folders, self._inside = folders, inside
        self._name = ""
        self._stack = ExitStack()
        self._running: Service | None = None

    def to(self, name: str, **sections: dict[str, Any]) -> Service:
        """The service of that name, started unless it runs already. sections: of its configuration."""
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
    """Configure a decode worker's host memory and files below the pages, with --chaos-tiers alone."""
    if not request.config.getoption("--chaos-tiers"):
        return {}
    return {**TIERS, "store": str(tmp_path_factory.getbasetemp() / "store")}


@pytest.fixture
def service(switch: Switch, request: pytest.FixtureRequest, tiers: dict[str, Any]) -> Service:
    """Two of everything; with --chaos-mapped one stage that maps one decode worker's memory."""
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
    """Two doors, and nothing to spare behind them: one group with a short queue, one decode worker. It
    remembers only with --chaos-tiers."""
    sections: dict[str, dict[str, Any]] = {
        "prefill": {"groups": 1, "max_waiting": 4, "cache_tokens": 4096},
        "decode": {**tiers, "workers": 1, "cache_tokens": 8192},
        "door": {"prefix_reuse": bool(tiers)},
    }
    return switch.to("alone", **sections)


Record = Callable[..., None]


@pytest.fixture(scope="session")
def record(amount: Amount, request: pytest.FixtureRequest) -> Record:
    """record(case, tries, bad, note, add): a row of chaos.json."""

    def write(case: str, tries: int, bad: int, note: str = "", add: bool = amount.add) -> None:
        case = "".join(f"{one}_" for one in _FORMS if request.config.getoption(f"--chaos-{one}")) + case
        where = "in one process" if amount.inside else ""
        row = Row(case, tries, bad, "; ".join(filter(None, (note, where))))
        print(row, flush=True)
        results.write(row, add)

    return write
