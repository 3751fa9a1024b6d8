"""Every overlay as Kubernetes gets it: all fields are valid, and agree with the configuration."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ray._private.ray_constants import RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
from ray._raylet import Config  # type: ignore[attr-defined]

from deltafront.service import app
from deltafront.service.cli import main as cli
from deltafront.service.local.local_ray import PROXY_PERIOD_S
from deltafront.workers.model.directory import store
from deltafront.workers.replica import HEAD_PATIENCE_S

from .local_cluster import LABEL
from .manifests import (
    FETCHING,
    GROUPS,
    KUBERNETES,
    OVERLAYS,
    ROOT,
    Object,
    container,
    of_kind,
    pod_templates,
    ray_service,
    rendered,
    settings,
    templates,
    with_component,
    worker_groups,
)

KUSTOMIZATIONS = [*(f"overlays/{name}" for name in OVERLAYS), "gateway"]
KUBERAY_TLS = ("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
"""Variables that KubeRay sets in every Ray container if tlsOptions are set."""
CUSTOM = {"RayService", "PodMonitor", "PrometheusRule", "GRPCRoute", "HTTPRoute", "Gateway"}


def validated(objects: list[Object], folder: Path) -> None:
    """Validate objects. Raises AssertionError with the errors of kubernetes-validate."""
    path = folder / "objects.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    tool = Path(sys.executable).parent / "kubernetes-validate"
    if not tool.exists():
        pytest.skip("kubernetes-validate is a development dependency")
    command = [tool, "--strict", "-k", "1.37", path]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_overlay_is_tested() -> None:
    assert sorted(path.name for path in (KUBERNETES / "overlays").iterdir()) == sorted(OVERLAYS)


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_core_objects_are_valid(folder: str, tmp_path: Path) -> None:
    objects = rendered(folder)
    core = [one for one in objects if one["kind"] not in CUSTOM]
    if core:
        validated(core, tmp_path)
    assert all(one["metadata"]["namespace"] == "deltafront" for one in objects)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pod_templates_are_valid_pods(overlay: str, tmp_path: Path) -> None:
    """Kubernetes does not check pod templates in custom resources, and would drop a misspelt field."""
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name} | template["metadata"]}
        | {"spec": template["spec"]}
        for name, template in templates(overlay).items()
    ]
    validated(pods, tmp_path)


def test_validation_finds_a_misspelt_field(tmp_path: Path) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    spec = {"containers": [{"name": "x", "image": "x", "resuorces": {}}]}
    with pytest.raises(AssertionError, match="resuorces"):
        validated([pod | {"spec": spec}], tmp_path)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_service_selects_the_api_servers_and_their_ports(overlay: str) -> None:
    door, objects = settings(overlay).door, rendered(f"overlays/{overlay}")
    group = worker_groups(overlay)["door"]
    pod = container(group["template"])
    assert {port["name"]: port["containerPort"] for port in pod["ports"]} == {
        "grpc": door.grpc_port,
        "http": door.http_port,
        "door-metrics": door.metrics_port,
    }
    assert pod["readinessProbe"]["grpc"]["port"] == door.grpc_port
    (service,) = [one for one in of_kind(objects, "Service") if one["metadata"]["name"] == "deltafront"]
    grpc, http = service["spec"]["ports"]
    assert (grpc["targetPort"], grpc["appProtocol"]) == ("grpc", "kubernetes.io/h2c")
    assert http["targetPort"] == "http"
    labels = group["template"]["metadata"]["labels"] | {"ray.io/group": "door"}
    assert service["spec"]["selector"].items() <= labels.items()
    for kind, port in (("GRPCRoute", grpc), ("HTTPRoute", http)):
        (route,) = of_kind(rendered("gateway"), kind)
        (backend,) = route["spec"]["rules"][0]["backendRefs"]
        assert (backend["name"], backend["port"]) == ("deltafront", port["port"])
        (gateway,) = of_kind(rendered("gateway"), "Gateway")
        listeners = {one["name"]: one["hostname"] for one in gateway["spec"]["listeners"]}
        (parent,) = route["spec"]["parentRefs"]
        assert route["spec"]["hostnames"] == [listeners[parent["sectionName"]]]
        assert len(set(listeners.values())) == 2, "a listener takes one kind of route for a hostname"
        if kind == "HTTPRoute":  # GRPCRoute has no such field
            assert route["spec"]["rules"][0]["timeouts"] == {"request": "0s"}, "long answers are not cut"
    assert group["replicas"] == door.replicas and door.per_node == 1, "every door pod has its door"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_disruption_budget_drains_one_pod_at_a_time(overlay: str) -> None:
    """In Kubernetes, a pod may be evicted while more than minAvailable of the selected pods are ready."""
    budgets = {
        one["metadata"]["name"]: one["spec"] for one in of_kind(rendered(f"overlays/{overlay}"), BUDGET)
    }
    groups = worker_groups(overlay)
    pods = {"headgroup": 1} | {name: group["replicas"] for name, group in groups.items()}
    for name, spec in budgets.items():
        (among,) = spec["selector"].get("matchExpressions") or [
            {"values": [name.removeprefix("deltafront-")]}
        ]
        count = sum(pods.get(group, 0) for group in among["values"]) or 1
        assert spec["minAvailable"] == (1 if name == "deltafront-redis" else count - 1), name
    budget = budgets["deltafront-workers"]["selector"]["matchExpressions"][0]
    assert budget == {"key": "ray.io/group", "operator": "In", "values": ["headgroup", "prefill", "decode"]}
    assert set(budgets) == {"deltafront-door", "deltafront-workers", "deltafront-redis"}


BUDGET = "PodDisruptionBudget"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_gets_the_settings_of_the_configuration(overlay: str) -> None:
    config, pods = settings(overlay), templates(overlay)
    assert set(pods) <= {"head", *GROUPS}
    for name, template in pods.items():
        pod, spec = container(template), template["spec"]
        environment = {one["name"]: one["value"] for one in pod["env"]}
        assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert environment["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] == str(config.door.max_message_bytes)
        assert environment["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"] == str(PROXY_PERIOD_S)
        assert (
            int(environment["RAY_health_check_period_ms"]) * Config.health_check_failure_threshold()
            < 1000 * HEAD_PATIENCE_S
        )
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["volumeMounts"]}
        assert Path(config.model.path).is_relative_to(mounts.get("models", "/opt/deltafront/models"))
        assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
        assert (name in ("head", "door")) == ("tokens" in mounts), "who reads tokens"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert pod["resources"]["requests"]["memory"] == pod["resources"]["limits"]["memory"]
        named = {"part-of": "deltafront", "component": name}
        assert template["metadata"]["labels"] == {f"app.kubernetes.io/{key}": of for key, of in named.items()}
        if name != "head":
            assert "readinessProbe" in pod
    assert config.door.tokens_file == Path(mounts_of(pods["door"])["tokens"]) / "tokens"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_has_a_service_account_token(overlay: str) -> None:
    for name, template in pod_templates(overlay).items():
        assert template["spec"]["automountServiceAccountToken"] is False, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_has_a_read_only_root_and_no_privilege(overlay: str) -> None:
    for name, template in pod_templates(overlay).items():
        spec = template["spec"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for one in [*spec["containers"], *spec.get("initContainers", [])]:
            assert one["securityContext"] == {
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }, (name, one["name"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_written_path_is_on_a_writable_volume(overlay: str) -> None:
    """These are Ray's sessions, HAProxy's files, compiled kernels, libraries' files at home, and Redis'
    tables. test_confined.py shows that the service needs no others."""
    for name, template in pod_templates(overlay).items():
        writable = written_volumes(template)
        if name == "redis":
            assert writable == {"/data"} and container(template)["workingDir"] == "/data"
            continue
        assert {"/tmp", "/var/cache/deltafront"} <= writable
        assert ("/models" in writable) == (name == "model"), "only the Job that fetches it"
        environment = {one["name"]: one.get("value") for one in container(template)["env"]}
        assert name == "model" or environment["HOME"] in writable
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for path in re.findall(r"(?:TRITON_CACHE_DIR|HF_HOME)=(\S+)", dockerfile):
        assert Path(path).is_relative_to("/var/cache/deltafront")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_folders_that_ray_pods_write_have_mode_0700(overlay: str, tmp_path: Path) -> None:
    """An emptyDir has mode 0777, so pods mount a folder in it, which an init container makes first."""
    for name, template in templates(overlay).items():
        spec, folder = template["spec"], tmp_path / name
        first = spec["initContainers"][0]
        at = {mount["name"]: folder / mount["mountPath"].strip("/") for mount in first["volumeMounts"]}
        assert set(at) == {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
        for volume in at.values():
            volume.mkdir(parents=True)
            volume.chmod(0o777)
        program, *words = first["command"]
        subprocess.run([program, *(f"{folder}{one}" if one[0] == "/" else one for one in words)], check=True)
        for mount in container(template)["volumeMounts"]:
            if mount["name"] in at:
                assert (at[mount["name"]] / mount["subPath"]).stat().st_mode & 0o777 == 0o700


def written_volumes(template: Object) -> set[str]:
    mounts = container(template)["volumeMounts"]
    return {mount["mountPath"] for mount in mounts if not mount.get("readOnly")}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_are_files_that_only_the_pods_group_reads(overlay: str) -> None:
    for template in pod_templates(overlay).values():
        for volume in template["spec"].get("volumes", []):
            assert "secret" not in volume or volume["secret"]["defaultMode"] == 0o440


def mounts_of(template: Object) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container(template)["volumeMounts"]}


@pytest.mark.parametrize("overlay", FETCHING)
def test_fetched_model_is_the_served_model(overlay: str) -> None:
    objects = rendered(f"overlays/{overlay}")
    (model,) = [one for one in of_kind(objects, "ConfigMap") if one["metadata"]["name"] == "deltafront-model"]
    assert model["data"]["directory"] == settings(overlay).model.path
    (job,) = of_kind(objects, "Job")
    fetch = container(job["spec"]["template"])
    assert fetch["image"] == container(templates(overlay)["head"])["image"]
    words = shlex.split(fetch["command"][-1])
    assert words[-4:] == ["&&", "deltafront", "verify", "$MODEL"], (
        "which sets the mark that the head waits for"
    )
    fetched = [word for before, word in itertools.pairwise(words) if before == "--include"]
    assert tuple(fetched) == store._HUB_FILES, "Llama's repositories have their weights twice"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_named_object_is_rendered_or_made_by_the_guide(overlay: str) -> None:
    """Users create the secrets with the commands of docs/deploy.md. All other objects are rendered."""
    objects = rendered(f"overlays/{overlay}")
    have = {(one["kind"], one["metadata"]["name"]) for one in objects}
    guide = (ROOT / "docs" / "deploy.md").read_text()
    for kind, name in set(named(list(objects))):
        if kind == "Secret":
            assert f"create secret generic {name} " in guide, name
        else:
            assert (kind, name) in have, (kind, name)


def test_cpu_overlay_uses_the_model_in_its_image() -> None:
    objects = rendered("overlays/cpu")
    assert not [one for kind in ("Job", "PersistentVolumeClaim") for one in of_kind(objects, kind)]
    assert "models" not in {
        volume["name"] for one in templates("cpu").values() for volume in one["spec"]["volumes"]
    }
    assert Path(settings("cpu").model.path).parent == Path("/opt/deltafront/models")
    assert (
        'mv "${directory}" /opt/deltafront/models/smollm2-135m-instruct'
        in (ROOT / "deploy" / "Dockerfile").read_text()
    )


def test_own_model_volume_is_verified_without_a_network(tmp_path: Path) -> None:
    objects = with_component("pd-8b", "models/own-volume", tmp_path)
    (job,) = of_kind(objects, "Job")
    fetch = container(job["spec"]["template"])
    assert fetch["command"] == ["bash", "-c", 'deltafront verify "$MODEL"']
    assert [one["name"] for one in fetch["env"]] == ["MODEL"]
    (policy,) = [
        one for one in of_kind(objects, "NetworkPolicy") if one["metadata"]["name"] == "deltafront-model"
    ]
    assert policy["spec"]["egress"] == [] and set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_containers_run_their_own_start_and_kuberays(overlay: str) -> None:
    (service,) = of_kind(rendered(f"overlays/{overlay}"), "RayService")
    assert service["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    commands = {tuple(container(one)["command"]) for one in templates(overlay).values()}
    assert len(commands) == 1
    assert not any("args" in container(one) for one in templates(overlay).values())


KEYS = {
    "configMapKeyRef": ("ConfigMap", "name"),
    "secretKeyRef": ("Secret", "name"),
    "secret": ("Secret", "secretName"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}


def named(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of every object to which others refer."""
    if isinstance(value, list):
        for one in value:
            yield from named(one)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in KEYS and isinstance(inner, dict):
                kind, name = KEYS[key]
                yield kind, inner[name]
            yield from named(inner)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_drained_before_they_end(overlay: str) -> None:
    """preStop takes less time than the pod has, and leaves Serve enough: Serve ends a replica without a
    replacement early enough before the deadline."""
    config = settings(overlay)
    for name, group in worker_groups(overlay).items():
        grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
        before, deadline = pre_stop(container(group["template"]))
        owners = [one for one in (config.prefill, config.decode) if one.node_labels[LABEL] == name]
        ends = [app._SHUTDOWN_S + one.drain_s for one in owners]
        if name == "door":
            ends = [app._DOOR_SHUTDOWN_S + config.door.drain_s]
            environment = {one["name"]: one["value"] for one in container(group["template"])["env"]}
            least = [float(environment[f"RAY_SERVE_{of}_MIN_DRAINING_PERIOD_S"]) for of in DRAINED]
            assert before >= 10, "the pod's endpoint is gone by then"
            assert before + deadline - max(ends) + sum(least) <= 30, "beyond what the door still answers"
        assert deadline >= max(ends) + ELSEWHERE_S[name], f"{name} has no time to load elsewhere"
        assert before + deadline + RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S < grace
        assert grace <= 600, "cluster autoscalers end it after that"
    assert "lifecycle" not in container(templates(overlay)["head"])


ELSEWHERE_S = {"door": 5, "prefill": 60, "decode": 60}
"""The least time for loading a replica elsewhere; 0 for doors, because each of their pods has one and no
other has room."""
RAY_STARTS_S = 60
"""Time for a pod and Ray's node in it to start on a busy machine."""
DRAINED = ("DIRECT_INGRESS", "PROXY")
"""The time in which a door and then its HAProxy leave, each after Serve's minimum."""


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_requests_outlast_the_replacement_of_an_only_pod(overlay: str) -> None:
    """KubeRay makes the next pod after the end of the only one."""
    load_s = max(ELSEWHERE_S.values())
    assert settings(overlay).door.worker_wait_s >= 2 * (RAY_STARTS_S + load_s)


def pre_stop(pod: Object) -> tuple[float, float]:
    """Return the seconds that a pod sleeps first, and the deadline of its `deltafront drain`."""
    words = pod["lifecycle"]["preStop"]["exec"]["command"]
    asleep = 0.0
    if words[:2] == ["bash", "-c"]:
        sleep, words = (shlex.split(part) for part in words[2].split(";"))
        assert sleep[0] == "sleep"
        asleep = float(sleep[1])
    program, name, *arguments = words
    assert program in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    commands = typer.main.get_group(cli.app).commands
    with commands[name].make_context(name, arguments) as context:
        return asleep, float(context.params["deadline_s"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_services_meet_kuberays_rules(overlay: str) -> None:
    (service,) = of_kind(rendered(f"overlays/{overlay}"), "RayService")
    cluster = ray_service(overlay)["rayClusterConfig"]
    assert len(service["metadata"]["name"]) <= 47
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pins
    assert cluster["authOptions"] == {"mode": "token"}
    redis = cluster["gcsFaultToleranceOptions"]["redisAddress"].split(":")[0]
    assert redis in {one["metadata"]["name"] for one in of_kind(rendered(f"overlays/{overlay}"), "Service")}
    for group in cluster["workerGroupSpecs"]:
        assert 1 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_kustomization_lists_every_dashboard() -> None:
    kustomization = yaml.safe_load((ROOT / "dashboards" / "kustomization.yaml").read_text())
    listed = [name for one in kustomization["configMapGenerator"] for name in one["files"]]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "dashboards").glob("*.json"))
    made = [
        one["data"]
        for one in of_kind(rendered("overlays/pd-8b"), "ConfigMap")
        if "grafana_dashboard" in one["metadata"].get("labels", {})
    ]
    assert sorted(name for data in made for name in data) == sorted(listed)


def test_patches_are_json_6902() -> None:
    """A strategic merge patch would silently replace a RayService's worker groups."""
    for overlay in OVERLAYS:
        folder = KUBERNETES / "overlays" / overlay
        for patch in yaml.safe_load((folder / "kustomization.yaml").read_text())["patches"]:
            text = patch.get("patch") or (folder / patch["path"]).read_text()
            assert all("op" in operation for operation in yaml.safe_load(text)), overlay
