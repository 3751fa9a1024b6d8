"""A Kubernetes cluster, used by kubectl; the overlay `cpu` made small enough for two cores; and pods with
clients."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..manifests import KUBERNETES, Object
from ..test_serve_config import generator

NAMESPACE, CLIENTS, STRANGERS, MONITORING = "deltafront", "clients", "strangers", "monitoring"
REGISTRY = "docker.io/library"
IMAGE, REDIS = f"{REGISTRY}/deltafront:cpu", f"{REGISTRY}/redis:7.4"
PROMETHEUS = f"{REGISTRY}/prometheus:debian"
ASKING = Path(__file__).with_name("asking.py")
WAIT_S = 900.0
"""The longest wait for any event, long enough for a busy machine."""
POLL_S = 2.0
"""The pause between two looks at the cluster: kubectl takes CPU from the pods."""
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass(frozen=True)
class Kube:
    """A cluster. kubectl: the command, with the administrator's credentials."""

    kubectl: tuple[str, ...]

    def __call__(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        command = [*self.kubectl, *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, timeout=WAIT_S
        )
        assert done.returncode == 0 or not check, f"{' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def apply(self, *objects: Object) -> None:
        self("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def get(self, kind: str, *arguments: str, namespace: str = NAMESPACE) -> list[Object]:
        found: list[Object] = json.loads(self("-n", namespace, "get", kind, *arguments, "-o", "json"))[
            "items"
        ]
        return found

    def service(self) -> Object:
        (found,) = self.get("rayservice")
        return found

    def pods(self, group: str, *, living: bool = True) -> list[Object]:
        """Return the pods of a Ray group or of one of our roles."""
        label = f"deltafront/role={group}" if group in ("redis", "model") else f"ray.io/group={group}"
        pods = self.get("pods", "-l", label)
        return [one for one in pods if not living or "deletionTimestamp" not in one["metadata"]]

    def logs(self, group: str, since: str) -> str:
        """Return what a group's pods have written since a time in ISO 8601."""
        names = [pod["metadata"]["name"] for pod in self.pods(group)]
        return "".join(self("-n", NAMESPACE, "logs", name, f"--since-time={since}") for name in names)

    def until(self, true: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
        """Wait for a result, and return it. Raises AssertionError with the status of the cluster."""
        deadline = time.monotonic() + seconds
        while not (found := true()):
            if time.monotonic() > deadline:
                said = self("-n", NAMESPACE, "get", "pods,rayservice", "-o", "wide", check=False)
                raise AssertionError(f"{what}: not after {seconds:.0f} s\n{said}\n{self.reason()}")
            time.sleep(POLL_S)
        return found

    def token(self) -> str:
        """Return the clients' token, which the guide's command has made."""
        given = ("get", "secret", "deltafront-tokens", "-o", "jsonpath={.data.tokens}")
        return base64.b64decode(self("-n", NAMESPACE, *given)).decode()

    def reason(self) -> str:
        """Return the deployments' messages from `kubectl describe rayservice`."""
        return self("-n", NAMESPACE, "describe", "rayservice", check=False)


def names(objects: list[Object]) -> set[str]:
    return {one["metadata"]["name"] for one in objects}


def group_of(pod: Object) -> str:
    """Return a pod's Ray group, or its role if it has none."""
    labels = pod["metadata"].get("labels", {})
    return str(labels.get("ray.io/group", labels.get("deltafront/role", "")))


def is_ready(pod: Object) -> bool:
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def small(folder: Path, changes: Mapping[str, Mapping[str, Any]], *components: str) -> list[Object]:
    """Render the overlay `cpu` with a smaller configuration and smaller pods.

    Args:
        changes: More keys for sections of the configuration.
        components: Components of deploy/kubernetes to add.
    """
    overlay = KUBERNETES / "overlays" / "cpu"
    config = yaml.safe_load((overlay / "config.yaml").read_text())
    config["prefill"] |= {"stages": 1, "cache_tokens": 4096, "cpus_per_stage": 0.1, "drain_s": 20}
    config["decode"] |= {"cache_tokens": 8192, "cpus": 0.1, "drain_s": 20}
    config["door"] |= {"cpus": 0.1}
    for section, keys in changes.items():
        config[section] |= keys
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "serve.yaml").write_text(generator().patch(folder))
    groups = {"headGroupSpec": "2Gi", **{f"workerGroupSpecs/{n}": "4Gi" for n in range(3)}}  # two replicas
    sizes: list[Object] = [
        {
            "op": "replace",
            "path": f"/spec/rayClusterConfig/{group}/template/spec/containers/0/resources",
            "value": {
                "requests": {"cpu": "50m", "memory": "600Mi"},
                "limits": {"cpu": "2", "memory": memory},
            },
        }
        for group, memory in groups.items()
    ]
    # An old replica drains when `drain_s` and 20 s of the deadline are left: here after 50 s, not after 200.
    hooks = [
        f"/spec/rayClusterConfig/workerGroupSpecs/{n}/template/spec/containers/0/lifecycle" for n in (1, 2)
    ]
    sizes += [{"op": "replace", "path": f"{one}/preStop/exec/command/3", "value": "90"} for one in hooks]
    if "autoscaling" in components:  # the sample waits for five minutes before an empty pod goes
        idle = "/spec/rayClusterConfig/autoscalerOptions/idleTimeoutSeconds"
        sizes.append({"op": "replace", "path": idle, "value": 20})
    (folder / "sizes.yaml").write_text(yaml.safe_dump(sizes))
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": [relative(overlay, folder)],
        "components": [relative(KUBERNETES / one, folder) for one in components],
        "patches": [
            {"path": name, "target": {"kind": "RayService"}} for name in ("serve.yaml", "sizes.yaml")
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True, text=True)
    text = done.stdout.replace("image: deltafront:", f"image: {REGISTRY}/deltafront:")  # as the guide does
    return list(yaml.safe_load_all(text))


def relative(path: Path, start: Path) -> str:
    return os.path.relpath(path.resolve(), start.resolve())


def client_pod(name: str, namespace: str, *command: str, token: str = "") -> Object:
    """Make a client's pod that fits Pod Security `restricted`."""
    container = {
        "name": "client",
        "image": IMAGE,
        "command": list(command),
        "env": [{"name": "DELTAFRONT_TOKEN", "value": token}],
        "securityContext": RESTRICTED,
        "resources": {"requests": {"cpu": "10m", "memory": "100Mi"}},
    }
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec | {"automountServiceAccountToken": False},
    }
