"""A node with a door loses its power: nothing refuses a connection, nothing says goodbye. It runs last,
because nobody switches the node on again."""

from __future__ import annotations

import datetime
import subprocess
import time

import pytest

from ..manifests import Object
from .conftest import MAKER, Deployed
from .kube import Kube, group_of, is_ready
from .test_faults import REPLACED

NODE = 1
OFF_S = 90.0
"""Ray, Kubernetes and TCP have given the node up by then."""


def test_a_door_without_power_costs_no_request_and_no_worker(deployed: Deployed) -> None:
    kube = deployed.kube
    if MAKER is None:
        pytest.skip("nobody can switch this cluster's nodes off")
    node = str(kube.get("nodes")[NODE]["metadata"]["name"])
    kube("cordon", node)
    for pod in on(kube, node):
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        if group_of(pod) == "redis":
            pytest.skip("Redis' volume is on the node that can be switched off")
        if group_of(pod) != "door":
            kube("-n", namespace, "delete", "pod", name, "--wait=false")
    kube.until(lambda: {"door"} == {group_of(pod) for pod in on(kube, node)}, f"{node} has only doors")
    kube("uncordon", node)
    deployed.wait_until_whole()
    (door,) = [pod for pod in kube.pods("door") if pod["spec"]["nodeName"] == node]
    began = datetime.datetime.now(datetime.UTC).isoformat()
    with deployed.load("a door's node loses its power") as load:
        subprocess.run([MAKER, "off", str(NODE)], check=True)
        kube.until(lambda: not is_ready(kube.get("nodes")[NODE]), f"{node} is given up")
        time.sleep(OFF_S)
    assert not load.lost
    replaced = [group for group in ("prefill", "decode") if REPLACED in kube.logs(group, began)]
    assert not replaced, f"{door['metadata']['name']} took workers with it"


def on(kube: Kube, node: str) -> list[Object]:
    return kube.get("pods", "-A", f"--field-selector=spec.nodeName={node}")
