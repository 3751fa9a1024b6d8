"""`kubectl drain` of each node in turn: a pod that leaves waits if nothing can replace it."""

from __future__ import annotations

import json

import pytest

from .conftest import Deployed
from .kube import NAMESPACE, Kube, names

DRAIN = (
    "--ignore-daemonsets",
    "--delete-emptydir-data",
    "--force",
    "--pod-selector=app.kubernetes.io/part-of=deltafront",
)


def node_of(kube: Kube, group: str) -> str:
    return str(kube.pods(group)[0]["spec"]["nodeName"])


def on(kube: Kube, node: str) -> set[str]:
    pods = kube.get("pods", "-l", "ray.io/is-ray-node=yes", f"--field-selector=spec.nodeName={node}")
    return names(pods)


def drained(deployed: Deployed, node: str) -> None:
    """Drain a node. Redis stays; prefill and decode stay while the head is away."""
    kube = deployed.kube
    try:
        kube("drain", node, *DRAIN, "--timeout=600s", check=False)
        kube.until(lambda: not on(kube, node), f"{node} has none of Ray's pods")
    finally:
        kube("uncordon", node)


def test_draining_the_prefill_node_loses_no_request(deployed: Deployed) -> None:
    node = node_of(deployed.kube, "prefill")
    with deployed.load("node of prefill drained") as load:
        drained(deployed, node)
    assert not load.lost


@pytest.mark.slow
def test_draining_the_ray_heads_node_loses_no_request(deployed: Deployed) -> None:
    node = node_of(deployed.kube, "headgroup")
    with deployed.load("node of the head drained") as load:
        drained(deployed, node)
    assert not load.lost


def test_redis_stays_on_a_node_that_is_drained(deployed: Deployed) -> None:
    kube = deployed.kube
    (redis,) = kube.pods("redis")
    name = redis["metadata"]["name"]
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    evict = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    with pytest.raises(AssertionError, match="disruption budget"):
        kube("create", "--raw", path, "-f", "-", stdin=json.dumps(evict))
    assert names(kube.pods("redis")) == {name}
