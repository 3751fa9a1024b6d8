"""If a change cannot work, the old service continues to answer, and the RayService's status has the
reason."""

from __future__ import annotations

from .conftest import Deployed
from .kube import NAMESPACE


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
    assert not load.lost
    deployed.apply()


WRONG_IMAGE = (
    '[{"op": "replace", "path": "/spec/rayClusterConfig/headGroupSpec/template/spec/containers/0/image",'
    ' "value": "docker.io/library/deltafront:none"}]'
)
