"""A node with a door loses its power: nothing refuses a connection, nothing says goodbye. It runs last,
because nobody switches the node on again."""

from __future__ import annotations

import datetime
import subprocess

import pytest

from ..manifests import Object
from .conftest import MAKER, Deployed, ready_of
from .kube import Kube, group_of, is_ready
from .test_faults import REPLACED

pytestmark = pytest.mark.slow
NODE = 1


def test_a_door_without_power_costs_no_request_and_no_worker(deployed: Deployed) -> None:
    kube = deployed.kube
    if MAKER is None:
        pytest.skip("nobody can switch this cluster's nodes off")
    node = str(kube.get("nodes")[NODE]["metadata"]["name"])
    assert "redis" not in map(group_of, on(kube, node)), "its volume belongs to the node that stays"
    kube("cordon", node)  # the clients' pod must not come here
    for pod in on(kube, node):
        if group_of(pod) != "door":
            kube("-n", pod["metadata"]["namespace"], "delete", "pod", pod["metadata"]["name"], "--wait=false")
    kube.until(lambda: {"door"} == set(map(group_of, on(kube, node))), f"{node} has only doors")
    deployed.wait_until_whole()
    began = datetime.datetime.now(datetime.UTC).isoformat()
    with deployed.load("a door's node loses its power") as load:
        subprocess.run([MAKER, "off", str(NODE)], check=True)
        kube.until(lambda: not is_ready(kube.get("nodes")[NODE]), f"{node} is given up")
        kube("delete", "node", node)  # KubeRay replaces no pod that only terminates (kuberay#4078)
        kube.until(lambda: len(ready_of(deployed, "door")) == 2, "the door has been replaced")
    assert not load.lost
    replaced = [group for group in ("prefill", "decode") if REPLACED in kube.logs(group, began)]
    assert not replaced, "a door must take no worker with it"


def on(kube: Kube, node: str) -> list[Object]:
    return kube.get("pods", "-A", f"--field-selector=spec.nodeName={node}")
