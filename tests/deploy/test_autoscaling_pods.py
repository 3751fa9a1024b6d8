"""The component for KubeRay's autoscaler, on an overlay with a worker group of each kind."""

from __future__ import annotations

import copy
import socket
import subprocess
from pathlib import Path

from ray.autoscaler._private.kuberay import node_provider

from .manifests import Object, container, of_kind, ray_service, with_component
from .test_manifests import validated
from .test_redis import free_port

OVERLAY = "pd-8b"


def autoscaled(folder: Path) -> Object:
    """Return the overlay's RayService with the component."""
    (service,) = of_kind(with_component(OVERLAY, "autoscaling", folder), "RayService")
    spec: Object = service["spec"]
    return spec


def test_autoscaling_component_changes_only_the_numbers_of_pods(tmp_path: Path) -> None:
    plain, grown = ray_service(OVERLAY), copy.deepcopy(autoscaled(tmp_path))
    cluster = grown["rayClusterConfig"]
    assert cluster.pop("enableInTreeAutoscaling") is True
    options = cluster.pop("autoscalerOptions")
    assert options["version"] == "v2" and options["idleTimeoutSeconds"] >= 60
    assert cluster["headGroupSpec"]["template"]["spec"]["volumes"].pop()["name"] == "service-account"
    waits = cluster["headGroupSpec"]["template"]["spec"]["initContainers"].pop(1)
    assert waits["name"] == "wait-for-kubernetes" and waits["image"] == "deltafront:gpu"
    most = {}
    for group, before in zip(
        cluster["workerGroupSpecs"], plain["rayClusterConfig"]["workerGroupSpecs"], strict=True
    ):
        most[group["groupName"]] = (group["minReplicas"], group["maxReplicas"])
        group["maxReplicas"] = before["maxReplicas"]
    assert most == {"door": (2, 2), "prefill": (1, 3), "decode": (1, 3)}
    assert grown == plain


def test_only_the_autoscaler_has_a_service_account_token(tmp_path: Path) -> None:
    """Only its container in the head's pod mounts the volume with the token."""
    cluster = autoscaled(tmp_path)["rayClusterConfig"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert not any(one["template"]["spec"]["automountServiceAccountToken"] for one in pods)
    (volume,) = [
        volume
        for one in pods
        for volume in one["template"]["spec"]["volumes"]
        if any("serviceAccountToken" in source for source in volume.get("projected", {}).get("sources", []))
    ]
    mounts = {one["name"]: one["mountPath"] for one in cluster["autoscalerOptions"]["volumeMounts"]}
    token = Path(mounts[volume["name"]]) / "token"
    assert str(token) == node_provider.IN_CLUSTER_TOKEN_PATH
    assert volume["name"] not in {
        mount["name"] for one in pods for mount in container(one["template"])["volumeMounts"]
    }


def test_the_autoscaler_is_a_valid_container(tmp_path: Path) -> None:
    cluster = autoscaled(tmp_path)["rayClusterConfig"]
    spec = copy.deepcopy(cluster["headGroupSpec"]["template"]["spec"])
    own = ("env", "resources", "securityContext", "volumeMounts")
    options = {name: cluster["autoscalerOptions"][name] for name in own}
    spec["containers"].append({"name": "autoscaler", "image": "x"} | options)
    validated([{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}], tmp_path)
    assert options["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_autoscaler_and_the_cleanup_of_redis_reach_kubernetes(tmp_path: Path) -> None:
    """KubeRay's cleanup Job copies the head's init containers, one of which waits for Kubernetes' API."""
    policies = of_kind(with_component(OVERLAY, "autoscaling", tmp_path), "NetworkPolicy")
    (policy,) = [one["spec"] for one in policies if one["metadata"]["name"] == "deltafront-autoscaler"]
    (among,) = policy["podSelector"]["matchExpressions"]
    assert (among["key"], set(among["values"])) == ("ray.io/node-type", {"head", "redis-cleanup"})
    assert {one["port"] for rule in policy["egress"] for one in rule["ports"]} == {443, 6443}


def test_the_head_waits_until_it_reaches_kubernetes(tmp_path: Path) -> None:
    """The head's containers are never restarted, and the autoscaler exits if it cannot reach the API."""
    head = autoscaled(tmp_path)["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    command = head["initContainers"][1]["command"]
    port = free_port()
    place = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
    waiting = subprocess.Popen(
        command, env={"PATH": "/usr/bin:/bin"} | place, stdout=subprocess.PIPE, text=True
    )
    assert waiting.stdout is not None
    line = waiting.stdout.readline()
    assert line == f"waits for Kubernetes' API at 127.0.0.1:{port}: Connection refused\n"
    with socket.create_server(("127.0.0.1", port)):
        assert waiting.wait(60) == 0
