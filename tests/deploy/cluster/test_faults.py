"""If pods are deleted or killed under load, no request is lost. The longest pause is printed."""

from __future__ import annotations

import datetime
import json
import time

import pytest

from .conftest import Deployed, active, ready_of
from .kube import NAMESPACE, is_ready, names

GROUPS = ("door", "prefill", "decode", "headgroup")
REPLACED = "replacing what is lost"
"""A replica's log about its worker (workers/replica.py)."""


def test_guides_commands_lead_to_an_answer(applied: Deployed) -> None:
    assert applied.answer.strip()
    with applied.load("no fault") as load:
        pass
    assert load.requests and not load.lost


@pytest.mark.parametrize(
    "group", ["door", *(pytest.param(group, marks=pytest.mark.slow) for group in (*GROUPS[1:], "redis"))]
)
def test_a_deleted_pod_loses_no_request(deployed: Deployed, group: str) -> None:
    kube = deployed.kube
    (gone, *_) = kube.pods(group)
    name, uid = gone["metadata"]["name"], gone["metadata"]["uid"]
    with deployed.load(f"{group} deleted") as load:
        kube("-n", NAMESPACE, "delete", "pod", name, "--wait=false")
        kube.until(lambda: uid not in uids(deployed, group), f"{name} has left")
        kube.until(lambda: any(map(is_ready, kube.pods(group))), f"another {group} pod")
    assert not load.lost


@pytest.mark.parametrize("group", [*GROUPS, pytest.param("redis", marks=pytest.mark.slow)])
def test_a_killed_pod_loses_no_request(deployed: Deployed, group: str) -> None:
    kube = deployed.kube
    (gone, *_) = kube.pods(group)
    name, uid = gone["metadata"]["name"], gone["metadata"]["uid"]
    began = datetime.datetime.now(datetime.UTC).isoformat()
    with deployed.load(f"{group} killed") as load:
        kube("-n", NAMESPACE, "delete", "pod", name, "--force", "--grace-period=0")
        kube.until(lambda: uid not in uids(deployed, group), f"{name} is gone")
        kube.until(lambda: any(map(is_ready, kube.pods(group))), f"another {group} pod")
    assert not load.lost
    others = {"prefill", "decode"} - {group}
    replaced = [other for other in others if REPLACED in kube.logs(other, began)]
    assert not replaced, "a worker that streams to a dead pod must not count as dead"


def test_one_of_two_killed_decode_pods_loses_no_request(deployed: Deployed) -> None:
    """A pod has 2 CPUs for Ray, so the second worker needs the second pod; Ray would pack smaller ones."""
    kube = deployed.kube
    deployed.apply(decode={"workers": 2, "cpus": 1.2})
    decode_pods(deployed, 2)
    kube.until(lambda: len(ready_of(deployed, "decode")) == 2 and deployed.is_healthy(), "two decode workers")
    gone = kube.pods("decode")[0]["metadata"]["name"]
    with deployed.load("one of two decode killed") as load:
        kube("-n", NAMESPACE, "delete", "pod", gone, "--force", "--grace-period=0")
        kube.until(lambda: gone not in names(kube.pods("decode", living=False)), f"{gone} is gone")
        kube.until(lambda: len(ready_of(deployed, "decode")) == 2, "another decode pod")
    deployed.apply()
    decode_pods(deployed, 1)
    kube.until(lambda: len(kube.pods("decode", living=False)) == 1, "one decode pod")
    assert not load.lost


def decode_pods(deployed: Deployed, count: int) -> None:
    """Change the number of decode pods as docs/deploy.md says: KubeRay takes it from the RayCluster."""
    group = "/spec/workerGroupSpecs/2"
    patch = [
        {"op": "replace", "path": f"{group}/{key}", "value": count} for key in ("maxReplicas", "replicas")
    ]
    cluster = ("raycluster", active(deployed))
    deployed.kube("-n", NAMESPACE, "patch", *cluster, "--type=json", "-p", json.dumps(patch))


def uids(deployed: Deployed, group: str) -> set[str]:
    return {one["metadata"]["uid"] for one in deployed.kube.pods(group, living=False)}


@pytest.mark.slow
def test_api_server_exits_soon_after_its_last_answer(deployed: Deployed) -> None:
    """No other pod has room for its replica, so the door does not wait for one."""
    kube = deployed.kube
    name = kube.pods("door")[0]["metadata"]["name"]
    with deployed.load("door deleted, and timed") as load:
        began = time.monotonic()
        kube("-n", NAMESPACE, "delete", "pod", name, "--wait=false")
        kube.until(lambda: name not in names(kube.pods("door", living=False)), f"{name} has left")
        took = time.monotonic() - began
    print(f"a door left after {took:.0f} s")
    assert not load.lost and took < 90, "of 104 s before; 30 s and a generous rest for a busy machine"
