"""The sample that lets KubeRay's autoscaler make pods, on an overlay that has a group of each kind."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import yaml

from .manifests import KUBERNETES, Object, of_kind, ray_service, rendered

OVERLAY = "pd-8b"


def autoscaled(folder: Path) -> Object:
    """The overlay's RayService with the component, as an operator would add it."""
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUBERNETES / "overlays" / OVERLAY, folder.resolve())],
        "components": [os.path.relpath(KUBERNETES / "autoscaling", folder.resolve())],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    (service,) = of_kind(rendered(str(folder.resolve())), "RayService")
    spec: Object = service["spec"]
    return spec


def test_pods_may_grow_and_nothing_else_changes(tmp_path: Path) -> None:
    plain, grown = ray_service(OVERLAY), copy.deepcopy(autoscaled(tmp_path))
    cluster = grown["rayClusterConfig"]
    assert cluster.pop("enableInTreeAutoscaling") is True
    options = cluster.pop("autoscalerOptions")
    assert set(options) == {"version", "idleTimeoutSeconds", "resources", "securityContext"}
    assert options["version"] == "v2" and options["idleTimeoutSeconds"] >= 60
    most = {}
    for group, before in zip(
        cluster["workerGroupSpecs"], plain["rayClusterConfig"]["workerGroupSpecs"], strict=True
    ):
        most[group["groupName"]] = (group["minReplicas"], group["maxReplicas"])
        group["maxReplicas"] = before["maxReplicas"]
    assert most == {"door": (2, 2), "prefill": (1, 3), "decode": (1, 3)}
    assert grown == plain
