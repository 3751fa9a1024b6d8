"""Upgrades under load, and autoscaling."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Deployed, active, ready_of
from .kube import NAMESPACE

GROWING: dict[str, dict[str, dict[str, Any]]] = {
    "prefill": {"prefill": {"max_groups": 2, "backlog_s": 0.01, "cpus_per_stage": 1.2}},
    "decode": {"decode": {"max_workers": 2, "usage": 0.001, "cpus": 1.2}},
}
"""Any load is enough for a second group or worker. A pod has 2 CPUs for Ray, so it needs a second pod."""


WRONG_IMAGE = (
    '[{"op": "replace", "path": "/spec/rayClusterConfig/headGroupSpec/template/spec/containers/0/image",'
    ' "value": "docker.io/library/deltafront:none"}]'
)


def test_upgrades_to_no_image_and_to_another_lose_no_request(deployed: Deployed) -> None:
    """The second change adds the autoscaler or removes it, so a second cluster takes over."""
    kube = deployed.kube
    with deployed.load("an image that does not exist") as load:
        kube("-n", NAMESPACE, "patch", "rayservice", "deltafront", "--type=json", "-p", WRONG_IMAGE)
        kube.until(lambda: "ImagePull" in kube("-n", NAMESPACE, "get", "pods"), "a pod that has no image")
        without_head = pending(deployed)
    assert not load.lost
    with deployed.load("upgrade to a second cluster") as load:
        upgrade(deployed, without_head)
    assert not load.lost


def upgrade(deployed: Deployed, without_head: str = "") -> None:
    """Upgrade. without_head: a cluster that leaves meanwhile. KubeRay's init container waits for its head,
    ignores SIGTERM and takes much CPU, so its pods are deleted by force."""
    kube, before = deployed.kube, active(deployed)
    apply(deployed, autoscaling=not scales(deployed))

    def serves() -> bool:
        leaving = kube.get("pods", "-l", f"ray.io/cluster={without_head}") if without_head else []
        gone = [one["metadata"]["name"] for one in leaving if "deletionTimestamp" in one["metadata"]]
        if gone:
            kube("-n", NAMESPACE, "delete", "pod", *gone, "--force", "--grace-period=0", check=False)
        return active(deployed) != before

    kube.until(serves, "the second cluster serves")


@pytest.mark.slow
@pytest.mark.parametrize("group", GROWING)
def test_load_adds_a_pod_that_leaves_later(deployed: Deployed, group: str) -> None:
    """Only `serveConfigV2` changes. When it changes back, the second pod becomes empty and leaves."""
    kube = deployed.kube
    if not scales(deployed):
        upgrade(deployed)
        deployed.wait_until_whole()
    with deployed.load(f"a second {group} pod comes") as load:
        deployed.apply("autoscaling", **GROWING[group])
        kube.until(lambda: len(ready_of(deployed, group)) == 2, f"a second {group} pod")
    assert not load.lost
    with deployed.load(f"the second {group} pod goes") as load:
        deployed.apply("autoscaling")
        kube.until(lambda: len(kube.pods(group, living=False)) == 1, f"a single {group} pod")
    assert not load.lost


@pytest.mark.slow
def test_a_rollback_during_an_upgrade_loses_nothing(deployed: Deployed) -> None:
    """The upgrade adds the autoscaler or, after the test above, removes it: either is another cluster.

    KubeRay gives the second cluster the old configuration back, then lets it take over.
    """
    kube, scaled = deployed.kube, scales(deployed)
    with deployed.load("rollback during an upgrade") as load:
        apply(deployed, autoscaling=not scaled)
        kube.until(lambda: pending(deployed), "a second cluster is being made")
        apply(deployed, autoscaling=scaled)
        kube.until(lambda: not pending(deployed), "one cluster is left")
    assert not load.lost and scales(deployed) == scaled


def scales(deployed: Deployed) -> bool:
    """Return True if the cluster that serves has an autoscaler."""
    (serving,) = (
        one for one in deployed.kube.get("raycluster") if one["metadata"]["name"] == active(deployed)
    )
    return bool(serving["spec"].get("enableInTreeAutoscaling"))


def apply(deployed: Deployed, *, autoscaling: bool) -> None:
    if autoscaling:
        deployed.apply("autoscaling")
    else:
        deployed.apply()


def pending(deployed: Deployed) -> str:
    status = deployed.kube.service()["status"].get("pendingServiceStatus", {})
    return str(status.get("rayClusterName", ""))
