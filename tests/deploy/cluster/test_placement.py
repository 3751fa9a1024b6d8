"""Pods of the GPU overlays are placed on the nodes that docs/deploy.md promises. The nodes are only objects,
so nothing runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from ..manifests import FETCHING, Object, rendered
from .kube import Kube

PLACED, MODELS = "placed", "deltafront-models"
GPUS = {"large": (8, 81_559), "other": (8, 81_559), "small": (8, 40_960), "plain": (0, 0), "bare": (0, 0)}
"""The GPUs of a node, and the MiB of each in the label of feature discovery."""


def node(name: str, gpus: int, gpu_mib: int) -> tuple[Object, Object]:
    """Make a node object with its status."""
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "deltafront/made": "yes"}
    labels |= {"nvidia.com/gpu.memory": str(gpu_mib)} if gpus else {}
    taints = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}] if gpus else []
    made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    room = {"cpu": "128", "memory": "1000Gi", "pods": "110", "ephemeral-storage": "1000Gi"}
    room |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now()}
    status = {"capacity": room, "allocatable": room, "conditions": [ready | {"lastTransitionTime": now()}]}
    return made | {"spec": {"taints": taints}}, {"status": status}


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def lease(name: str) -> Object:
    renewed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": renewed}
    metadata = {"name": name, "namespace": "kube-node-lease"}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def volume(name: str, claim: str, mode: str) -> Object:
    """Make a volume for a claim of the overlay: on the node `large` if only one node may mount it, else for
    all nodes."""
    spec = {
        "capacity": {"storage": "300Gi"},
        "accessModes": [mode],
        "hostPath": {"path": "/nowhere"},
        "claimRef": {"namespace": PLACED, "name": claim},
        "persistentVolumeReclaimPolicy": "Delete",
    }
    if mode == "ReadWriteOnce" and claim == MODELS:
        there = [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["large"]}]
        spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [{"matchExpressions": there}]}}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}


def forget(kube: Kube) -> None:
    """Remove the namespace, without waiting for KubeRay's cleanup Job, which cannot run here."""
    kube("-n", PLACED, "delete", "rayservice", "--all", "--wait=false", check=False)
    kube("delete", "namespace", PLACED, "--wait=false", check=False)

    def gone() -> bool:
        for cluster in kube.get("raycluster", namespace=PLACED):
            name = cluster["metadata"]["name"]
            kube("-n", PLACED, "patch", "raycluster", name, "--type=merge", "-p", NO_FINALIZERS, check=False)
        kube(
            "-n",
            PLACED,
            "delete",
            "pods",
            "--all",
            "--force",
            "--grace-period=0",
            "--wait=false",
            check=False,
        )
        return not kube("get", "namespace", PLACED, "--ignore-not-found")

    kube.until(gone, f"the namespace {PLACED} is gone")


NO_FINALIZERS = '{"metadata": {"finalizers": null}}'


@pytest.fixture
def nodes(kube: Kube) -> Iterator[None]:
    """Add nodes that are ready, and let only them take pods."""
    real = [one["metadata"]["name"] for one in kube.get("nodes")]
    made = {name: node(name, *gpus) for name, gpus in GPUS.items()}
    ended = threading.Event()

    def beat() -> None:
        while not ended.is_set():
            kube.apply(*map(lease, made))
            ended.wait(5.0)

    beats = threading.Thread(target=beat)
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": PLACED}})
    beats.start()
    try:
        for name, (content, status) in made.items():
            kube.apply(content)
            kube("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(status))
        kube("cordon", *real)
        yield
    finally:
        kube("uncordon", *real, check=False)
        forget(kube)
        kube("delete", "node", *made, check=False)
        kube("delete", "pv", "placed-models", "placed-redis", "--wait=false", check=False)
        ended.set()
        beats.join()


@pytest.mark.parametrize("overlay", FETCHING)
def test_kubernetes_schedules_every_pod_on_a_suitable_node(kube: Kube, nodes: None, overlay: str) -> None:
    objects = [moved(one) for one in rendered(f"overlays/{overlay}")]
    (claim,) = [one for one in objects if one["kind"] == "PersistentVolumeClaim"]
    (mode,) = claim["spec"]["accessModes"]
    kube.apply(volume("placed-models", MODELS, mode))
    kube.apply(volume("placed-redis", "data-deltafront-redis-0", "ReadWriteOnce"))
    kube.apply(*objects)
    groups = {one["groupName"]: one["replicas"] for one in workers(objects)}
    wanted = 1 + sum(groups.values()) + 2  # with the head, the model's Job and Redis

    def where() -> dict[str, list[str]] | None:
        pods = kube.get("pods", namespace=PLACED)
        found: dict[str, list[str]] = {}
        for pod in pods:
            if (at := pod["spec"].get("nodeName")) is None:
                return None
            found.setdefault(group_of(pod), []).append(at)
        return found if sum(map(len, found.values())) == wanted else None

    found = kube.until(where, f"all pods of {overlay} on nodes")
    print(f"\n{overlay}: {found}")
    assert {group: len(at) for group, at in found.items()} == groups | {
        "headgroup": 1,
        "model": 1,
        "redis": 1,
    }
    large = {"large", "other"}
    assert set(found["prefill"] + found.get("decode", [])) <= large, "GPUs that are large enough"
    if overlay.startswith("one-gpu"):
        assert {at for group in ("prefill", "door", "headgroup", "model") for at in found[group]} == {"large"}
        return
    assert len(set(found["door"])) == 2, "doors apart"
    if "decode" in found:
        assert found["decode"] == found["prefill"], "on the stages' host where it has room"


def workers(objects: list[Object]) -> list[Object]:
    (service,) = [one for one in objects if one["kind"] == "RayService"]
    found: list[Object] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return found


def moved(content: Object) -> Object:
    return content | {"metadata": content["metadata"] | {"namespace": PLACED}}


def group_of(pod: Any) -> str:
    labels = pod["metadata"]["labels"]
    return str(labels.get("ray.io/group") or labels["deltafront/role"])
