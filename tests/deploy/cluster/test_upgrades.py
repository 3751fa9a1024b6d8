"""A second cluster takes over under load, and autoscaling makes pods. Last, for the second cluster stays."""

from __future__ import annotations

from ..manifests import Object
from .conftest import Deployed
from .kube import is_ready

QUICK = {"max_groups": 2, "backlog_s": 0.01}


def test_an_upgrade_loses_nothing_and_load_makes_pods(deployed: Deployed) -> None:
    """The autoscaler comes with a second cluster, which takes over. Load then wants a group more."""
    kube = deployed.kube
    before = active(deployed)
    with deployed.load("upgrade to a second cluster") as load:
        deployed.apply("autoscaling", prefill=QUICK, decode={"max_workers": 2})
        kube.until(lambda: active(deployed) != before, "the second cluster serves")
    assert not load.lost
    with deployed.load("a second prefill pod comes") as load:
        kube.until(lambda: len(ready_of(deployed, "prefill")) == 2, "a second prefill pod")
    assert not load.lost


def active(deployed: Deployed) -> str:
    return str(deployed.kube.service()["status"]["activeServiceStatus"]["rayClusterName"])


def ready_of(deployed: Deployed, group: str) -> list[Object]:
    """Ready pods of the cluster that serves."""
    pods = [one for one in deployed.kube.pods(group) if is_ready(one)]
    return [one for one in pods if one["metadata"]["labels"]["ray.io/cluster"] == active(deployed)]
