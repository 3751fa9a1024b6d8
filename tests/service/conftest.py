"""Fixtures: a tiny model directory, and a door in this process with fake workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltafront.service.client import DeltafrontClient
from deltafront.service.metrics import Metrics

from .inprocess import House, Loop, open_house, settings, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_house(model: Path, tmp_path: Path) -> Iterator[Callable[..., House]]:
    """make_house(**door settings) → a running door with one fake group and one fake decode worker."""
    loop, servers = Loop(), []

    def make(**door: Any) -> House:
        metrics = Metrics(tmp_path / f"metrics{len(servers)}")
        house, server = loop.run(open_house(settings(model, **door), metrics, loop))
        servers.append((house, server))
        return house

    yield make
    for house, server in servers:
        loop.run(server.stop(0.2))
        loop.run(house.fleet.stop())
    loop.stop()


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    return make_house()


@pytest.fixture
def client(house: House) -> Iterator[DeltafrontClient]:
    with DeltafrontClient(house.address) as client:
        yield client
