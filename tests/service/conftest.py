"""Fixtures: a tiny model directory, and a door in this process with fake workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from deltafront.kernels.methods import load
from deltafront.service.client import DeltafrontClient, retries
from deltafront.service.config import ServiceConfig
from deltafront.service.metrics import Metrics
from deltafront.service.request.run import attempt
from deltafront.service.tracing import Tracing
from deltafront.workers.roles import DecodeWorker, Group

from . import fakes
from .inprocess import House, Loop, open_house, settings, write_model
from .pki import Authority

load("deltafront.benchmarks.whole_prompt.methods")  # registers methods that cannot be served


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_house(model: Path, tmp_path: Path) -> Iterator[Callable[..., House]]:
    """Start doors with one fake group and one fake decode worker: make_house(**door settings) or
    make_house(config).

    others=[…] adds a door to the workers of existing ones. metrics: another door's, shared as by the doors of
    a node.
    """
    loop, servers = Loop(), []

    def make(
        config: ServiceConfig | None = None,
        others: Sequence[House] = (),
        traced: Tracing | None = None,
        metrics: Metrics | None = None,
        **door: Any,
    ) -> House:
        metrics = metrics or Metrics(tmp_path / f"metrics{len(servers)}")
        opened = open_house(config or settings(model, **door), metrics, loop, others, traced)
        house, server = loop.run(opened)
        servers.append((house, server))
        return house

    yield make
    for house, server in servers:
        loop.run(server.stop(0.2))
        loop.run(house.door._requests.stop())
        loop.run(house.fleet.stop())
    loop.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses before retries."""
    monkeypatch.setattr(attempt, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(retries, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
def doors(make_house: Callable[..., House], tmp_path: Path) -> tuple[House, House]:
    """Start two doors to the same workers, with the bearer tokens alpha and beta."""
    tokens = tmp_path / "tokens"
    tokens.write_text("alpha\nbeta\n")
    first = make_house(tokens_file=str(tokens))
    return first, make_house(others=[first], tokens_file=str(tokens))


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    return make_house()


@pytest.fixture
def client(house: House) -> Iterator[DeltafrontClient]:
    with DeltafrontClient(house.address) as client:
        yield client


class Served:
    """Two doors under Ray Serve with HAProxy, and fake workers as named Ray actors."""

    ports: ClassVar = {"grpc_port": 9020, "http_port": 8020, "metrics_port": 9484, "tls_port": 9453}
    address = f"127.0.0.1:{ports['grpc_port']}"
    http = f"http://127.0.0.1:{ports['http_port']}"
    metrics = f"http://127.0.0.1:{ports['metrics_port']}/metrics"
    encrypted = f"localhost:{ports['tls_port']}"
    token, other = "alpha", "beta"

    def __init__(self, group: Any, decode: Any, ca: Path) -> None:
        self.group = group
        self.decode = decode
        self.ca = ca

    def configure(self, actor: Any, **attributes: Any) -> None:
        import ray

        ray.get(actor.configure.remote(**attributes))

    def pages_used(self) -> int:
        import ray

        group, decode = ray.get([self.group.stats.remote(), self.decode.stats.remote()])
        return int(group.pages_total - group.pages_free + decode.pages_total - decode.pages_free)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start the service once per module, because other modules start their own Ray."""
    with serve(Served, tmp_path_factory.mktemp("served")) as running:
        yield running


@contextlib.contextmanager
def serve(kind: type[Served], folder: Path, **door: Any) -> Iterator[Served]:
    from deltafront.service.local.local_ray import running

    tokens = folder / "tokens"
    tokens.write_text(f"# two people\n{kind.token}\n{kind.other}\n")
    authority = Authority(folder / "pki")
    certificate, key = authority.sign("server")
    config = settings(
        write_model(folder / "model", positions=1 << 20),
        tokens_file=str(tokens),
        tls_certificate=str(certificate),
        tls_key=str(key),
        tls_only=False,
        **kind.ports,
        **door,
    )
    with running(config, _door_alone):
        group = _actor(Group, fakes.GroupProcess, "prefill:g0")
        decode = _actor(DecodeWorker, fakes.DecodeProcess, "decode:d0")
        yield kind(group, decode, authority.ca)


def _door_alone(config: Any, scratch: Path) -> Any:
    from deltafront.service.app import assemble

    return assemble(config, scratch)


def _actor(role: Any, kind: Any, name: str) -> Any:
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(fakes)
    from deltafront.workers.messages.states import NAMESPACE
    from deltafront.workers.remote import hosts

    options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "max_concurrency": 1000}
    return ray.remote(hosts(role)(kind)).options(**options).remote(name)
