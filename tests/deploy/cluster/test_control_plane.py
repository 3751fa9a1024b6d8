"""Requests are answered while one of Kubernetes' own processes is down for a minute."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .conftest import Deployed

pytestmark = pytest.mark.slow

PIDS = os.environ.get("CLUSTER_PIDS")
"""A folder with the id of each process of the control plane, in a file of the process's name."""
OUTAGE_S = 60.0


def test_no_request_is_lost_while_the_operator_is_down(deployed: Deployed) -> None:
    kube = deployed.kube
    (found,) = kube.get("deployments", "-A", "-l", "app.kubernetes.io/name=kuberay-operator")
    where = found["metadata"]
    operator = ("-n", where["namespace"], "scale", f"deployment/{where['name']}")
    with deployed.load("the operator down for a minute") as load:
        kube(*operator, "--replicas=0")
        try:
            time.sleep(OUTAGE_S)
        finally:
            kube(*operator, "--replicas=1")
    assert not load.lost


@pytest.mark.parametrize("process", ["apiserver", "kubelet-1"])
def test_no_request_is_lost_while_kubernetes_is_down(deployed: Deployed, process: str) -> None:
    if PIDS is None:
        pytest.skip("CLUSTER_PIDS is not set: a folder with the ids of the control plane's processes")
    with deployed.load(f"{process} down for a minute") as load, stopped(Path(PIDS) / process):
        time.sleep(OUTAGE_S)
    assert not load.lost


@contextmanager
def stopped(file: Path) -> Iterator[None]:
    """Stop a process, which then answers nobody, and let it continue."""
    pid = int(file.read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
