"""Doors with batches, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltafront.service.door.batches import asking, work
from deltafront.service.door.batches.routes import BatchOptions
from deltafront.service.door.batches.runner import BatchRunner
from deltafront.service.door.batches.storage import Storage
from deltafront.service.door.http_door import HttpDoor

from ...inprocess import House
from ..openai_calls import MODEL

TURN_S = 0.02


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_STORE_S", 0.05)
    monkeypatch.setattr(asking, "_LEAST_PAUSE_S", 0.02)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "batches"


@pytest.fixture
def house(make_house: Callable[..., House], tmp_path: Path) -> House:
    (tmp_path / "tokens").write_text("any name=ann\nbeta\n")
    house = make_house(model_name=MODEL, tokens_file=str(tmp_path / "tokens"))
    house.decode.remembers = False
    return house


@pytest.fixture
def runners() -> list[BatchRunner]:
    """The batches of the doors that `open_door` has started."""
    return []


@pytest.fixture
def open_door(
    house: House, place: Path, make_http: Callable[..., str], http_doors: list[HttpDoor],
    runners: list[BatchRunner],
) -> Iterator[Callable[..., str]]:  # fmt: skip
    """Start a door with batches: its id, and options of BatchOptions."""

    def make(door: str = "one", **more: Any) -> str:
        given = {"max_bytes": 1 << 24, "width": 4, "count": house.metrics.count_batch_lines, "turn_s": TURN_S}
        options = BatchOptions(Storage(str(place)), door=door, **{**given, **more})
        address = make_http(house, batches=options)
        runner = http_doors[-1].batches
        assert runner is not None
        runners.append(runner)
        house.loop.loop.call_soon_threadsafe(runner.start)
        return address

    yield make
    for runner in runners:
        house.loop.run(runner.stop())


@pytest.fixture
def address(open_door: Callable[..., str]) -> str:
    return open_door()
