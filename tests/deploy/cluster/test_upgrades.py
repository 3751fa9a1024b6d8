"""Upgrades under load, and autoscaling. They run last, because the second cluster stays."""

from __future__ import annotations

from .conftest import Deployed, active, ready_of

QUICK = {"max_groups": 2, "backlog_s": 0.01, "cpus_per_stage": 1.2}
"""A pod has 2 CPUs for Ray, so a second group needs a second pod."""


def test_upgrade_loses_no_request_and_load_adds_pods(deployed: Deployed) -> None:
    """The upgrade adds the autoscaler, so a second cluster takes over. Then the load needs another group."""
    kube = deployed.kube
    before = active(deployed)
    with deployed.load("upgrade to a second cluster") as load:
        deployed.apply("autoscaling", prefill=QUICK, decode={"max_workers": 2})
        kube.until(lambda: active(deployed) != before, "the second cluster serves")
    assert not load.lost
    with deployed.load("a second prefill pod comes") as load:
        kube.until(lambda: len(ready_of(deployed, "prefill")) == 2, "a second prefill pod")
    assert not load.lost
    with deployed.load("the second prefill pod goes") as load:
        deployed.apply("autoscaling", decode={"max_workers": 2})  # serveConfigV2 alone changes
        kube.until(lambda: len(kube.pods("prefill", living=False)) == 1, "a single prefill pod")
    assert not load.lost


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
        deployed.apply("autoscaling", decode={"max_workers": 2})
    else:
        deployed.apply()


def pending(deployed: Deployed) -> str:
    status = deployed.kube.service()["status"].get("pendingServiceStatus", {})
    return str(status.get("rayClusterName", ""))
