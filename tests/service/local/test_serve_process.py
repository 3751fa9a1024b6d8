"""`deltafront serve` as a process: its output, its log, and the cleanup after it is killed.

Starts a tiny model twice. The first service ends with Ray's control store; the second, in `make test-long`,
is killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from deltafront.benchmarks.engine.model import SHAPES, write_model
from deltafront.benchmarks.engine.setup import Setup
from deltafront.service.client import DeltafrontClient
from deltafront.service.config import ConfigError, load
from deltafront.service.errors import DeltafrontError, InvalidArgument
from deltafront.service.local.ports import check_ports
from deltafront.service.local.server_process import LocalService

from ..inprocess import HANG_S, wait_until

PORTS = {"door.grpc_port": 9031, "door.http_port": 8031, "door.metrics_port": 9531}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    write_model(folder / "model", SHAPES["tiny"], torch.device("cpu"))
    return Setup(folder / "model", SHAPES["tiny"], 1024, chunk_tokens=512, device="cpu", more=PORTS).write(
        folder
    )


@pytest.fixture
def service(config: Path) -> Iterator[LocalService]:
    with LocalService(config, start_s=600) as running:
        yield running


def lines(service: LocalService) -> list[str]:
    """Return the terminal's lines from the start of Ray on, without the model's warnings before it."""
    every = service.log.read_text().splitlines()
    return every[next(n for n, line in enumerate(every) if line.startswith("Starting Ray")) :]


def log(service: LocalService) -> str:
    found = re.search(r"their log is (\S+)$", lines(service)[0])
    assert found
    return Path(found[1]).read_text()


def audits(service: LocalService) -> list[dict[str, Any]]:
    entries = (line.partition("deltafront.audit:")[2] for line in log(service).splitlines())
    return [json.loads(entry) for entry in entries if entry]


def descendants(service: LocalService) -> list[psutil.Process]:
    return psutil.Process(service.pid).children(recursive=True)


def folder_of(processes: list[psutil.Process]) -> Path:
    """Return the service's folder, which contains the log of its control store."""
    command = next(" ".join(one.cmdline()) for one in processes if one.name() == "gcs_server")
    found = re.search(r"--log_dir=(\S+)/ray/session_", command)
    assert found
    return Path(found[1])


def nothing_is_left(config: Path, of: list[psutil.Process], folder: Path) -> None:
    alive: list[psutil.Process] = []

    def gone() -> bool:
        alive[:] = [one for one in of if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        return not alive

    wait_until(gone, f"processes are left: {alive}")
    wait_until(lambda: not folder.exists(), f"{folder} is left")
    wait_until(lambda: ports_are_free(config), "a port is taken")


def ports_are_free(config: Path) -> bool:
    try:
        check_ports(load(config).door)
    except ConfigError:
        return False
    return True


def test_serve_prints_addresses_and_logs_requests_until_ray_dies(service: LocalService, config: Path) -> None:
    wait_until(lambda: "Ready. Ctrl-C stops." in lines(service), "it is not ready")
    start, *where, _ready = lines(service)
    assert start.startswith("Starting Ray and Deltafront; their log is ")
    names = [line.split()[0] for line in where]
    assert names == ["model", "attention", "gRPC", "OpenAI", "metrics", "open"]
    assert where[2:] == [
        "gRPC      127.0.0.1:9031",
        "OpenAI    http://127.0.0.1:8031/v1",
        "metrics   http://127.0.0.1:9531/metrics",
        "open      to this machine alone",
    ]
    asked = [f"request-{number}" for number in range(12)]
    with DeltafrontClient(service.address) as client:
        for name in asked:
            list(client.generate("x" * 20, max_tokens=1, request_id=name))
            with pytest.raises(InvalidArgument):
                list(client.generate("x" * 20, temperature=-1, request_id=f"{name}-refused"))
        with pytest.raises(DeltafrontError):  # gRPC refuses the message, so no door reads its id
            list(client.generate("x" * (17 << 20)))
    every = (
        {"": "cancelled"}
        | dict.fromkeys(asked, "length")
        | {f"{name}-refused": "invalid_argument" for name in asked}
    )
    wait_until(lambda: len(audits(service)) >= len(every), "lines are missing")
    assert {one["request_id"]: one["finish"] for one in audits(service)} == every
    assert "ServeController" in log(service)

    process = service._process
    assert process is not None
    of = descendants(service)
    folder = folder_of(of)
    (store,) = (one for one in of if one.name() == "gcs_server")
    store.kill()
    assert process.wait(HANG_S) == 1
    last = lines(service)[-1]
    assert last.startswith(
        "deltafront: Ray's control store (gcs_server) was ended by SIGKILL, so the service has"
    )
    nothing_is_left(config, of, folder)


@pytest.mark.long
def test_a_service_that_is_killed_leaves_nothing(service: LocalService, config: Path) -> None:
    of = descendants(service)
    folder = folder_of(of)
    assert {"gcs_server", "raylet", "haproxy"} <= {one.name() for one in of}
    os.kill(service.pid, signal.SIGKILL)
    nothing_is_left(config, of, folder)
