"""The cluster of `make cluster-test`: $KUBECONFIG's, or one that $CLUSTER_UP makes. All tests share one
service."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ..builder import IMAGE as builder_image
from ..builder import Builder, archive_name, build_package
from ..manifests import Object
from .guide import Guide
from .kube import (
    ASKING,
    CLIENTS,
    IMAGE,
    MONITORING,
    NAMESPACE,
    PROMETHEUS,
    REDIS,
    STRANGERS,
    Kube,
    client_pod,
    group_of,
    is_ready,
    names,
    small,
)

MAKER = os.environ.get("CLUSTER_UP")
"""A program with the commands `--nodes 2 --mtls up` (with cert-manager), `down`, `import ARCHIVE…`,
`off NODE`; `kubectl …` and `run COMMAND…` in the nodes' network."""
RESULT = os.environ.get("CLUSTER_RESULT") or None
"""A file that gets a line of JSON for each fault."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(3600))
            if not config.getoption("--cluster"):
                item.add_marker(pytest.mark.skip(reason="needs a Kubernetes: make cluster-test"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the medians of all runs in RESULT."""
    if RESULT is None or not Path(RESULT).exists():
        return
    of_fault: dict[str, list[dict[str, Any]]] = {}
    for line in map(json.loads, Path(RESULT).read_text().splitlines()):
        of_fault.setdefault(line["fault"], []).append(line)
    for fault, lines in of_fault.items():
        names = [name for name in lines[0] if name not in ("fault", "lost")]
        medians = ", ".join(f"{name} {statistics.median(one[name] for one in lines):g}" for name in names)
        lost = sum(one.get("lost", 0) for one in lines)
        terminalreporter.write_line(f"{fault}: {lost} lost; medians of {len(lines)}: {medians}")


@pytest.fixture(scope="session")
def kube(request: pytest.FixtureRequest) -> Iterator[Kube]:
    """A cluster with KubeRay's operator and our images."""
    archives: Callable[[], list[Path]] = request.getfixturevalue("archives")
    if os.environ.get("KUBECONFIG"):
        load = os.environ.get("CLUSTER_IMPORT")
        if load is None:
            pytest.skip(
                "CLUSTER_IMPORT is not set: a command that loads an image archive into $KUBECONFIG's cluster"
            )
        for archive in archives():
            subprocess.run([*load.split(), archive], check=True)
        yield Kube(("kubectl",))
        return
    if MAKER is None:
        pytest.skip("no Kubernetes: set KUBECONFIG, or CLUSTER_UP to a program that makes one")
    made = os.environ.get("CLUSTER_KEPT") is None  # a kept cluster is up, has the images and stays
    try:
        if made:
            subprocess.run([MAKER, "--nodes", "2", "--mtls", "up"], check=True)
            subprocess.run([MAKER, "import", *archives()], check=True)
        yield Kube((MAKER, "kubectl"))
    finally:
        if made:
            subprocess.run([MAKER, "down"], check=False)


@dataclass
class Load:
    """A record of clients' requests. lost: errors; pause: the longest time between two events, s; until: its
    end, s after the fault. A late pause is the start of a replacement, which takes CPU from what serves."""

    requests: int = 0
    lost: tuple[str, ...] = ()
    pause: float = 0.0
    until: float = 0.0


@dataclass(frozen=True)
class Deployed:
    """The service, and clients in namespaces with and without access. answer: what the guide's last command
    printed."""

    kube: Kube
    folder: Path
    answer: str = ""

    @property
    def guide(self) -> Guide:
        return Guide(self.folder, MAKER)

    def apply(self, *components: str, **changes: dict[str, Any]) -> list[Object]:
        objects = small(self.folder, changes, *components)
        self.kube.apply(*objects)
        return objects

    def wait_until_ready(self) -> None:
        self.kube("-n", NAMESPACE, "wait", "--for=condition=Ready", "rayservice/deltafront", "--timeout=900s")
        self.kube.until(
            lambda: [one for one in self.kube.pods("door") if is_ready(one)], "a door that is ready"
        )

    def wait_until_whole(self) -> None:
        """Wait until every pod and replica exists and is ready, for example after a fault."""
        self.wait_until_ready()  # kubectl itself waits, and takes no CPU from the pods that start
        wanted = {"headgroup": 1, "door": 2, "prefill": 1, "decode": 1, "redis": 1}

        def whole() -> bool:
            pods = [(group_of(one), is_ready(one)) for one in self.kube.get("pods")]
            found = Counter(group for group, _ in pods if group in wanted)
            ready = all(ready for group, ready in pods if group in wanted)
            return found == wanted and ready and self.is_healthy()

        self.kube.until(whole, "all pods ready")

    def is_healthy(self) -> bool:
        """Return True if all deployments exist and none waits for a replica."""
        deployments = self.application().get("serveDeploymentStatuses", {})
        return bool(deployments) and all(one["status"] == "HEALTHY" for one in deployments.values())

    def application(self) -> dict[str, Any]:
        """Return the application's status in the RayService. While Serve builds the application again, it is
        empty or has no deployments."""
        active = self.kube.service().get("status", {}).get("activeServiceStatus", {})
        found: dict[str, Any] = active.get("applicationStatuses", {}).get("deltafront", {})
        return found

    @contextmanager
    def load(self, what: str) -> Iterator[Load]:
        """Run clients that send requests during the `with` block. After it, the load has their results, which
        are also printed."""
        load, name, kube = Load(), f"load-{time.monotonic_ns()}", self.kube

        def lines() -> list[str]:
            return kube("-n", CLIENTS, "logs", name, check=False).splitlines()

        command = ("python", "-c", ASKING.read_text(), "deltafront.deltafront:9000")
        kube.apply(client_pod(name, CLIENTS, *command, token=kube.token()))
        kube.until(lambda: len(lines()) >= 2, "a first answer to each client")
        began = time.time()
        try:
            yield load
            seen = len(lines())
            kube.until(lambda: len(lines()) >= seen + 4, "answers after the change")
            kube("-n", CLIENTS, "exec", name, "--", "touch", "/tmp/enough")
            kube.until(lambda: phase(kube, name) in ("Succeeded", "Failed"), "the clients' end")
        finally:
            asked = [json.loads(line) for line in lines() if line.startswith("{")]
            load.requests = len(asked)
            load.lost = tuple(one["error"] for one in asked if "error" in one)
            longest = max(asked, key=lambda one: one["pause"], default={"pause": 0.0, "paused_at": began})
            load.pause, load.until = longest["pause"], longest["paused_at"] - began
            usual = sorted(one["pause"] for one in asked)[len(asked) // 2] if asked else 0.0
            print(
                f"\n{what}: {load.requests} requests, {len(load.lost)} lost, "
                f"longest pause {load.pause:.1f} s, until {load.until:.0f} s (median {usual:.1f} s)"
            )
            record(what, load, usual)
            kube("-n", CLIENTS, "delete", "pod", name, "--wait=false", check=False)


def record(what: str, load: Load, usual: float) -> None:
    pauses = {"longest_pause_s": round(load.pause, 2), "pause_until_s": round(load.until)}
    pauses["median_pause_s"] = round(usual, 2)
    recorded({"fault": what, "requests": load.requests, "lost": len(load.lost)} | pauses)


def recorded(line: dict[str, Any]) -> None:
    if RESULT is not None:
        with Path(RESULT).open("a") as file:
            file.write(json.dumps(line | {"load_average": os.getloadavg()[0]}) + "\n")


def phase(kube: Kube, name: str) -> str:
    return kube("-n", CLIENTS, "get", "pod", name, "-o", "jsonpath={.status.phase}")


def active(deployed: Deployed) -> str:
    return str(deployed.kube.service()["status"]["activeServiceStatus"]["rayClusterName"])


def ready_of(deployed: Deployed, group: str) -> list[Object]:
    """Return the ready pods of the cluster that serves."""
    pods = [one for one in deployed.kube.pods(group) if is_ready(one)]
    return [one for one in pods if one["metadata"]["labels"]["ray.io/cluster"] == active(deployed)]


@pytest.fixture(scope="session")
def applied(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    """Apply the service once. Every namespace of the tests enforces Pod Security `restricted`."""
    for name, labels in (
        (NAMESPACE, {}),
        (CLIENTS, {"deltafront/clients": "yes"}),
        (STRANGERS, {}),
        (MONITORING, {}),
    ):
        enforced = {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"name": name, "labels": enforced | labels}
        kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    deployed = Deployed(kube, tmp_path_factory.mktemp("overlay"))
    small(deployed.folder, {})
    guide = deployed.guide
    if "deltafront-tokens" not in names(kube.get("secrets")):  # else the cluster is kept
        guide.run("kubectl -n deltafront create secret")
        if MAKER is not None:
            claim_for_redis(kube)
    guide.run("kubectl kustomize")
    began = time.monotonic()
    guide.run("kubectl -n deltafront wait")
    ready_s = time.monotonic() - began
    answer = guide.run("kubectl -n deltafront port-forward", "deltafront generate")
    times = {"ready_s": round(ready_s, 1), "first_answer_s": round(time.monotonic() - began, 1)}
    print(f"\nafter `kubectl apply`: {times}")
    recorded({"fault": "none, from an empty namespace"} | times)
    return replace(deployed, answer=answer)


def claim_for_redis(kube: Kube) -> None:
    """Claim a volume of the first node, which cannot be switched off, for Redis: volumes belong to nodes."""
    node = kube.get("nodes")[0]["metadata"]["name"]
    volumes = [one["metadata"]["name"] for one in kube.get("pv") if node in json.dumps(one["spec"])]
    metadata = {"name": "data-deltafront-redis-0", "namespace": NAMESPACE}
    spec = {"accessModes": ["ReadWriteOnce"], "volumeName": volumes[0]}
    spec["resources"] = {"requests": {"storage": "1Gi"}}
    kube.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})


@pytest.fixture
def deployed(applied: Deployed) -> Deployed:
    applied.wait_until_whole()
    return applied


@pytest.fixture(scope="session")
def archives(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], list[Path]]:
    """Return a function that returns archives of our image and of others' (Redis, Prometheus). They are built
    unless the folder $CLUSTER_IMAGES has them, which keeps them."""

    def made() -> list[Path]:
        folder = Path(os.environ.get("CLUSTER_IMAGES") or tmp_path_factory.mktemp("archives"))
        folder.mkdir(parents=True, exist_ok=True)
        for name, package in ((IMAGE, None), (REDIS, "redis-server"), (PROMETHEUS, "prometheus")):
            if not (folder / archive_name(name)).exists():
                builder: Builder = request.getfixturevalue("image_builder")
                image = builder_image if package is None else build_package(builder, package)
                shutil.move(builder.archive(image, name), folder)
        return [folder / archive_name(name) for name in (IMAGE, REDIS, PROMETHEUS)]

    return made
