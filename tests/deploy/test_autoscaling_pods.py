"""The component for KubeRay's autoscaler, on an overlay with a worker group of each kind."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path

from ray.autoscaler._private.kuberay import node_provider

from .manifests import Object, container, of_kind, ray_service, with_component
from .test_manifests import validated

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
    own = ("args", "command", "env", "resources", "securityContext", "volumeMounts")
    options = {name: cluster["autoscalerOptions"][name] for name in own}
    spec["containers"].append({"name": "autoscaler", "image": "x"} | options)
    validated([{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}], tmp_path)
    assert options["securityContext"]["readOnlyRootFilesystem"] is True


def test_only_the_head_reaches_kubernetes(tmp_path: Path) -> None:
    policies = of_kind(with_component(OVERLAY, "autoscaling", tmp_path), "NetworkPolicy")
    (policy,) = [one["spec"] for one in policies if one["metadata"]["name"] == "deltafront-autoscaler"]
    assert policy["podSelector"]["matchLabels"]["ray.io/node-type"] == "head"
    assert {one["port"] for rule in policy["egress"] for one in rule["ports"]} == {443, 6443}


def test_an_autoscaler_that_fails_starts_again(tmp_path: Path) -> None:
    """It exits if Kubernetes' API does not answer, and KubeRay restarts none of the head's containers."""
    options = autoscaled(tmp_path)["rayClusterConfig"]["autoscalerOptions"]
    command = [*options["command"], *options["args"]]
    assert "$(RAY_CLUSTER_NAME)" in command[-1] and "$(RAY_CLUSTER_NAMESPACE)" in command[-1]
    command[-1] = command[-1].replace("$(RAY_CLUSTER_NAME)", "one").replace("$(RAY_CLUSTER_NAMESPACE)", "two")
    ray, once = tmp_path / "ray", tmp_path / "once"
    ray.write_text(f'#!/bin/sh\necho "$@"\ntest -e {once} && exec sleep 300\ntouch {once}; exit 3\n')
    ray.chmod(0o755)
    running = subprocess.Popen(
        command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    started = "kuberay-autoscaler --cluster-name one --cluster-namespace two\n"
    said = [running.stdout.readline() for _ in range(3)]
    assert said == [started, "the autoscaler ended with code 3, starts again in 15 s\n", started]
    running.terminate()
    assert running.wait(60) == 0
    assert running.stdout.read() == "", "the autoscaler has ended, too"
