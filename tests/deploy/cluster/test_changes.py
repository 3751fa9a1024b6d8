"""Changes of `serveConfigV2` alone lose nothing. If a change cannot work, the old service continues to
answer, and the RayService's status has the reason."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Deployed, active
from .kube import NAMESPACE

CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "another method": {"door": {"default_method": "streaming"}},
    "another model": {
        "model": {"adapter": None, "rope_theta": None, "max_position_embeddings": None},
        "door": {"model_name": "smollm2-135m-instruct"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_configuration_loses_no_request(deployed: Deployed, what: str) -> None:
    """The cluster stays, its replicas are replaced; afterwards the first configuration comes back."""
    kube, cluster = deployed.kube, active(deployed)
    for name, changes in ((what, CHANGES[what]), (f"back from {what}", {})):
        with deployed.load(name) as load:
            deployed.apply(**changes)
            kube.until(lambda: state(deployed) == "DEPLOYING", "the change is being deployed")
            kube.until(lambda: state(deployed) == "RUNNING", "the change is deployed")
        assert not load.lost and active(deployed) == cluster


def state(deployed: Deployed) -> str:
    return str(deployed.application().get("status"))


def test_a_configuration_that_does_not_load_changes_nothing(deployed: Deployed) -> None:
    kube = deployed.kube
    with deployed.load("a model that is not there") as load:
        deployed.apply(model={"path": "/opt/deltafront/models/of-another-image"})
        kube.until(lambda: "of-another-image" in said(deployed), "the reason")
    assert not load.lost and "Traceback" not in said(deployed), said(deployed)
    deployed.apply()


def said(deployed: Deployed) -> str:
    """Return the messages of the application and its deployments from the RayService's status."""
    status = deployed.kube.service()["status"]
    found = []
    for service in ("activeServiceStatus", "pendingServiceStatus"):
        for application in status.get(service, {}).get("applicationStatuses", {}).values():
            found += [application.get("message", "")]
            found += [
                one.get("message", "") for one in application.get("serveDeploymentStatuses", {}).values()
            ]
    return "\n".join(found)


def test_an_image_that_does_not_exist_changes_nothing(deployed: Deployed) -> None:
    kube = deployed.kube
    with deployed.load("an image that does not exist") as load:
        kube("-n", NAMESPACE, "patch", "rayservice", "deltafront", "--type=json", "-p", WRONG_IMAGE)
        kube.until(lambda: "ImagePull" in kube("-n", NAMESPACE, "get", "pods"), "a pod that has no image")
        pending = kube.service()["status"]["pendingServiceStatus"]["rayClusterName"]
    assert not load.lost
    deployed.apply()
    kube.until(lambda: has_left(deployed, pending), f"{pending} has left")


def has_left(deployed: Deployed, cluster: str) -> bool:
    """Return whether a cluster whose head never came has no pods left. Those that leave are deleted at once:
    KubeRay's init container, which waits for the head, ignores SIGTERM until the grace period ends."""
    pods = deployed.kube.get("pods", "-l", f"ray.io/cluster={cluster}")
    for pod in pods:
        if "deletionTimestamp" in pod["metadata"]:
            gone = ("pod", pod["metadata"]["name"], "--force", "--grace-period=0")
            deployed.kube("-n", NAMESPACE, "delete", *gone, check=False)
    return not pods


WRONG_IMAGE = (
    '[{"op": "replace", "path": "/spec/rayClusterConfig/headGroupSpec/template/spec/containers/0/image",'
    ' "value": "docker.io/library/deltafront:none"}]'
)
