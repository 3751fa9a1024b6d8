"""The head of a cluster dies, with Ray's control store and Serve's controller, and comes back. With Redis the
store keeps its data, so doors and workers on other nodes continue to serve."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltafront.service.app import serve_config
from deltafront.service.client import DeltafrontClient, DeltafrontError
from deltafront.service.config import parse

from ..deploy.local_cluster import LABEL, LocalCluster
from .conftest import Amount, Record, Switch
from .running import MODEL, PATIENCE_S, configuration, merge, waited, write_model

AWAY_S = 20.0
"""Seconds without a head. Raylets wait a minute for it."""
ALONE = {
    "prefill": {"groups": 1, "stages": 1, "node_labels": {LABEL: "all"}},
    "decode": {"workers": 1, "node_labels": {LABEL: "all"}},
    "door": {
        "replicas": 1,
        "node_labels": {LABEL: "all"},
        "host": "0.0.0.0",
    },  # each node has its own address
}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """Start Redis and return its address."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        yield f"127.0.0.1:{port}"
        process.kill()


@pytest.fixture
def cluster(
    amount: Amount, switch: Switch, tmp_path: Path, redis: str, tiers: dict[str, Any]
) -> Iterator[LocalCluster]:
    """Start a head, and a node with everything else."""
    switch.off()
    content = merge(merge(configuration(write_model(tmp_path / MODEL)), ALONE), {"decode": tiers})
    made = LocalCluster(("head", "all"), parse(content), redis)
    try:
        made.deploy(serve_config(content))
        yield made
    finally:
        made.stop()


@pytest.mark.timeout(24 * 3600)
def test_service_answers_while_the_ray_head_is_down(cluster: LocalCluster, record: Record) -> None:
    address = f"127.0.0.3:{9000 + 1}"
    with DeltafrontClient(address, retry_s=0) as client:
        waited(lambda: answers(client), lambda: "nobody answers", PATIENCE_S)
        cluster.remove(0)
        asked, bad, until = 0, 0, time.monotonic() + AWAY_S
        while time.monotonic() < until:
            asked, bad = asked + 1, bad + (not answers(client))
        cluster.add(0)
        back = waited(lambda: runs(cluster), lambda: "Serve is not back", PATIENCE_S)
        asked, bad = asked + 10, bad + sum(not answers(client) for _ in range(10))
    record(
        "head_dies", asked, bad, f"away {AWAY_S:g} s, with Redis; Serve's controller back after {back:.0f} s"
    )
    assert not bad


def answers(client: DeltafrontClient) -> bool:
    try:
        return bool(list(client.generate("x" * 200, max_tokens=4, ignore_eos=True)))
    except DeltafrontError as error:
        print(error, flush=True)
        return False


def runs(cluster: LocalCluster) -> bool:
    """Return whether Serve's controller reports a running application. False if the controller does not
    answer yet."""
    try:
        return bool(cluster.status()["status"] == "RUNNING")
    except OSError:
        return False
