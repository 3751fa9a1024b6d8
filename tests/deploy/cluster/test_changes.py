"""Changes of `serveConfigV2` alone lose nothing. If a change cannot work, the old service continues to
answer, and the RayService's status has the reason."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Deployed, active

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
