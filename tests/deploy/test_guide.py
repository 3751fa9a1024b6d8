"""The ten commands in docs/deploy.md: each has what it needs when it runs."""

from __future__ import annotations

import json
import re

import pytest

from deltafront.dashboards import ttft

from .manifests import FETCHING, KUBERNETES, OVERLAYS, ROOT, Object, of_kind, rendered, templates

INSTALLED_BY = {
    "RayService": "helm install kuberay-operator ",
    "PodMonitor": "helm install prometheus kube-prometheus-stack ",
    "PrometheusRule": "helm install prometheus kube-prometheus-stack ",
}
"""The commands that install kinds that are not Kubernetes' own."""
BUILT_IN = {
    *("ConfigMap", "Job", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget", "Service"),
    "StatefulSet",
}
APPLY = "kubectl kustomize deploy/kubernetes/overlays/"


def commands() -> list[str]:
    """Return the commands of the guide's first code block, in order."""
    guide = (ROOT / "docs" / "deploy.md").read_text()
    (block,) = re.findall(r"## From an empty cluster.*?\n```\n(.*?)```", guide, re.DOTALL)
    return str(block).splitlines()


def earlier(start: str) -> str:
    """Return the command that begins with `start` and precedes the overlay's `apply`."""
    lines = commands()
    (apply,) = [number for number, line in enumerate(lines) if line.startswith(APPLY)]
    (found,) = [line for line in lines[:apply] if line.startswith(start)]
    return found


def test_guide_deploys_in_ten_plain_commands() -> None:
    lines = commands()
    assert len(lines) == 10
    assert not [line for line in lines if re.search(r"&&|;|\|\|", line)]
    assert all(line.split()[0] in ("deltafront", "docker", "helm", "kubectl") for line in lines)
    assert lines[-1].startswith("deltafront generate ")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_guide_installs_custom_kinds_before_using_them(overlay: str) -> None:
    for kind in {one["kind"] for one in rendered(f"overlays/{overlay}")} - BUILT_IN:
        assert earlier(INSTALLED_BY[kind])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rendered_objects_are_valid(overlay: str) -> None:
    """`kubectl apply` stores the whole object in an annotation, and annotations may have 256 KiB in all."""
    for one in rendered(f"overlays/{overlay}"):
        assert len(json.dumps(one).encode()) < 250_000, one["metadata"]["name"]


def test_guide_creates_the_namespace_before_using_it() -> None:
    lines = commands()
    (made,) = [n for n, line in enumerate(lines) if "-n deltafront --create-namespace" in line]
    assert made < min(n for n, line in enumerate(lines) if "kubectl -n deltafront" in line)
    assert {one["metadata"]["namespace"] for one in rendered("overlays/one-gpu")} == {"deltafront"}


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "cpu"])
def test_gpu_pods_select_nodes_by_gpu_operator_labels_only(overlay: str) -> None:
    asked = set(re.findall(r"nvidia\.com/[\w.]+", json.dumps(rendered(f"overlays/{overlay}"))))
    assert asked == {"nvidia.com/gpu", "nvidia.com/gpu.memory"}
    assert earlier("helm install gpu-operator gpu-operator ")


def test_prometheus_selects_monitors_without_a_release_label() -> None:
    (values,) = re.findall(r"--set (\S+)", earlier(INSTALLED_BY["PodMonitor"]))
    spec = "prometheus.prometheusSpec"
    assert set(values.split(",")) == {
        f"{spec}.{kind}SelectorNilUsesHelmValues=false" for kind in ("podMonitor", "rule")
    }


def test_guide_uses_the_tested_kuberay_and_image_versions() -> None:
    assert "--version 1.7.0 " in earlier(INSTALLED_BY["RayService"])
    image = earlier("docker buildx build --push ").split(" -t ")[1].split()[0]
    (tag,) = re.findall(r"newTag: (\w+)", (KUBERNETES / "overlays/one-gpu/kustomization.yaml").read_text())
    assert image == f"$REGISTRY/deltafront:{tag}"


def test_network_policies_name_the_operators_namespaces() -> None:
    """KubeRay's operator is in the service's namespace, Prometheus in its own."""
    assert " -n deltafront " in earlier(INSTALLED_BY["RayService"])
    (namespace,) = re.findall(r" -n (\w+) ", earlier(INSTALLED_BY["PodMonitor"]))
    policies = json.dumps(of_kind(rendered("overlays/one-gpu"), "NetworkPolicy"))
    named = set(re.findall(r'"kubernetes.io/metadata.name": "([\w-]+)"', policies))
    assert named == {namespace, "kube-system"}


def test_guide_lists_every_connection_of_the_policies() -> None:
    """The guide's table names every namespace label, port and secret of policies and pods."""
    guide = (ROOT / "docs" / "deploy.md").read_text()
    trust = guide.partition("## Who trusts whom")[2].partition("\n## ")[0]
    policies = of_kind(rendered("overlays/one-gpu"), "NetworkPolicy")
    rules = [rule for one in policies for way in ("ingress", "egress") for rule in one["spec"].get(way, [])]
    ports = {port["port"] for rule in rules for port in rule.get("ports", [])} - {53}
    assert not [port for port in ports if str(port) not in trust]
    labels = set(re.findall(r'"(deltafront/\w+)": "yes"', json.dumps(policies)))
    assert labels and not [label for label in labels if f"`{label}=yes`" not in trust]
    assert "RayClusterMTLS" in trust and (KUBERNETES / "tls").is_dir()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_guide_creates_secrets_with_the_keys_that_pods_read(overlay: str) -> None:
    for name, key in keys(list(rendered(f"overlays/{overlay}"))):
        made = earlier(f"kubectl -n deltafront create secret generic {name} ")
        assert f"--from-literal={key}=" in made, key


def keys(value: object) -> set[tuple[str, str]]:
    """Return (secret, key) of all secrets that pods read."""
    if isinstance(value, list):
        return {one for inner in value for one in keys(inner)}
    if not isinstance(value, dict):
        return set()
    found = {one for inner in value.values() for one in keys(inner)}
    if reference := value.get("secretKeyRef"):
        found.add((reference["name"], reference["key"]))
    if "secretName" in value:
        found |= {(value["secretName"], item["key"]) for item in value["items"]}
    return found


@pytest.mark.parametrize("overlay", FETCHING)
def test_node_local_volume_is_mounted_on_one_node(overlay: str) -> None:
    objects = rendered(f"overlays/{overlay}")
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    (job,) = of_kind(objects, "Job")
    pods = [*templates(overlay).values(), job["spec"]["template"]]
    assert all(mounts_the_model(pod, claim["metadata"]["name"]) for pod in pods)
    nodes = {json.dumps(pod["spec"].get("affinity", {}).get("nodeAffinity"), sort_keys=True) for pod in pods}
    (mode,) = claim["spec"]["accessModes"]
    assert mode == ("ReadWriteOnce" if overlay.startswith("one-gpu") else "ReadWriteMany")
    if mode == "ReadWriteOnce":
        (only,) = nodes
        assert "nvidia.com/gpu.memory" in only
        tolerations = {json.dumps(pod["spec"].get("tolerations")) for pod in pods}
        assert len(tolerations) == 1, "who may be on that node"


def mounts_the_model(pod: Object, claim: str) -> bool:
    volumes = pod["spec"]["volumes"]
    return any(one.get("persistentVolumeClaim", {}).get("claimName") == claim for one in volumes)


def test_operations_guide_explains_every_part_of_the_ttft() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    table = guide.partition("| part | what it means | what helps |")[2].partition("\n\n")[0]
    parts = [part for matcher in (ttft._DOOR, ttft._DECODE) for part in matcher.split('"')[1].split("|")]
    assert len(parts) == 10
    assert not [part for part in ("queue", *parts) if f"`{part}`" not in table]
