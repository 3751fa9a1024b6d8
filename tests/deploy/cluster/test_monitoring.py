"""A Prometheus in a pod of `monitoring` finds what the PodMonitors select, through the network policies, and
tells of a total outage."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from deltafront.dashboards.build import DASHBOARDS

from ..manifests import KUBERNETES, Object
from .conftest import Deployed, ready_of
from .kube import MONITORING, NAMESPACE, PROMETHEUS, Kube, client_pod, names

POD = "prometheus-0"
LABEL = {"app.kubernetes.io/name": "prometheus"}
"""The label that Prometheus' operator sets and the network policies require."""
EVERY_S = 5
RAY = ("headgroup", "door", "prefill", "decode")
TARGETS = "/data/targets.json"
NOT_CONFIGURED = (
    "deltafront_certificate_",
    "deltafront_kv_tier_",
    "deltafront_profile_",
    "deltafront_shadow_",
)
"""Prefixes of series that need TLS at doors, host memory, a profile or `door.shadow`."""
ASK = """
import json, sys, urllib.parse, urllib.request
url = "http://127.0.0.1:9090/api/v1/" + sys.argv[1]
print(json.dumps(json.load(urllib.request.urlopen(url, timeout=30))["data"]))
"""
WRITE = "import pathlib, sys; print(pathlib.Path(sys.argv[1]).write_text(sys.argv[2]))"


def monitoring(kind: str) -> list[Object]:
    """Return the objects of a kind in the component `monitoring`."""
    files = (KUBERNETES / "monitoring").glob("*.yaml")
    objects = [one for path in files for one in yaml.safe_load_all(path.read_text())]
    return [one for one in objects if one["kind"] == kind]


def discovered(kube: Kube) -> list[Object]:
    """Return the targets that the PodMonitors select, with the labels that the operator gives them."""
    found = []
    for monitor in monitoring("PodMonitor"):
        spec, job = monitor["spec"], f"{NAMESPACE}/{monitor['metadata']['name']}"
        (endpoint,) = spec["podMetricsEndpoints"]
        selector = ",".join(f"{label}={value}" for label, value in spec["selector"]["matchLabels"].items())
        for pod in kube.get("pods", "-l", selector, "--field-selector=status.phase=Running"):
            ports = [port for one in pod["spec"]["containers"] for port in one.get("ports", [])]
            (port,) = [one["containerPort"] for one in ports if one["name"] == endpoint["port"]]
            metadata = pod["metadata"]
            labels = {"job": job, "namespace": metadata["namespace"], "pod": metadata["name"]}
            for label in spec["podTargetLabels"]:
                labels[re.sub(r"\W", "_", label)] = metadata["labels"][label]
            found.append({"targets": [f"{pod['status']['podIP']}:{port}"], "labels": labels})
    return found


def prometheus_objects() -> list[Object]:
    (rules,) = monitoring("PrometheusRule")
    config = {
        "global": dict.fromkeys(("scrape_interval", "evaluation_interval"), f"{EVERY_S}s"),
        "rule_files": ["/etc/monitoring/rules.yaml"],
        "scrape_configs": [{"job_name": "pods", "file_sd_configs": [{"files": [TARGETS]}]}],
    }
    files = {"prometheus.yaml": yaml.safe_dump(config), "rules.yaml": yaml.safe_dump(rules["spec"])}
    command = ("prometheus", "--config.file=/etc/monitoring/prometheus.yaml", "--storage.tsdb.path=/data")
    pod = client_pod(POD, MONITORING, *command)
    pod["metadata"]["labels"] = LABEL
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    spec["volumes"] = [
        {"name": "data", "emptyDir": {}},
        {"name": "files", "configMap": {"name": "prometheus"}},
    ]
    container |= {"image": PROMETHEUS, "readinessProbe": {"httpGet": {"path": "/-/ready", "port": 9090}}}
    container["volumeMounts"] = [
        {"name": "data", "mountPath": "/data"},
        {"name": "files", "mountPath": "/etc/monitoring"},
    ]

    metadata = {"name": "prometheus", "namespace": MONITORING}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files}, pod]


@dataclass(frozen=True)
class PrometheusPod:
    kube: Kube

    def inside(self, script: str, *arguments: str) -> Any:
        command = ("python3", "-c", script, *arguments)
        said = self.kube("-n", MONITORING, "exec", POD, "--", *command)
        return json.loads(said.splitlines()[-1])

    def ask(self, path: str) -> Any:
        """Return the data of a reply of the API."""
        return self.inside(ASK, path)

    def discover(self) -> None:
        """Tell Prometheus the pods of this moment: Debian's build cannot ask Kubernetes itself."""
        self.inside(WRITE, TARGETS, json.dumps(discovered(self.kube)))

    def up(self) -> dict[str, set[str]]:
        """Return the pods of each job that answer."""
        found: dict[str, set[str]] = {}
        for target in self.ask("targets?state=active")["activeTargets"]:
            if target["health"] == "up":
                found.setdefault(target["labels"]["job"], set()).add(target["labels"]["pod"])
        return found

    def firing(self, alert: str) -> bool:
        alerts = self.ask("alerts")["alerts"]
        return any(one["labels"]["alertname"] == alert and one["state"] == "firing" for one in alerts)


@pytest.fixture(scope="module")
def prometheus(applied: Deployed) -> Iterator[PrometheusPod]:
    kube = applied.kube
    kube.apply(*prometheus_objects())
    kube("-n", MONITORING, "wait", "--for=condition=Ready", f"pod/{POD}", "--timeout=300s")
    yield PrometheusPod(kube)
    kube("-n", MONITORING, "delete", "pod", POD)


def test_every_series_of_dashboards_and_alerts_is_scraped(
    deployed: Deployed, prometheus: PrometheusPod
) -> None:
    kube = deployed.kube
    prometheus.discover()
    doors = names(kube.pods("door"))
    ray = {name for group in RAY for name in names(kube.pods(group))}
    expected = {f"{NAMESPACE}/deltafront-door": doors, f"{NAMESPACE}/deltafront-ray": ray}
    kube.until(
        lambda: all(pods <= prometheus.up().get(job, set()) for job, pods in expected.items()),
        f"targets {expected}",
        seconds=120.0,
    )
    with deployed.load("Prometheus scrapes") as load:
        pass
    assert not load.lost
    queries = [query.expr for one in DASHBOARDS for panel in one.panels for query in panel.queries]
    (rules,) = monitoring("PrometheusRule")
    queries += [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]
    asked = set(re.findall(r"\b(?:deltafront|ray)_\w+", " ".join(queries)))
    time.sleep(3 * EVERY_S)
    missing = asked - set(prometheus.ask("label/__name__/values"))
    assert {name for name in missing if not name.startswith(NOT_CONFIGURED)} == set()


@pytest.mark.slow
def test_a_total_outage_fires_and_ends(deployed: Deployed, prometheus: PrometheusPod) -> None:
    kube = deployed.kube
    prometheus.discover()
    both = 'query?query=count(up{job=~".%2B/deltafront-door"}==1)==2'
    kube.until(lambda: prometheus.ask(both)["result"], "both doors are up", 120.0)
    assert not prometheus.firing("DeltafrontDown")
    with no_room(kube):
        for name in names(kube.pods("door")):
            kube("-n", NAMESPACE, "delete", "pod", name, "--force", "--grace-period=0")
        prometheus.discover()
        kube.until(lambda: prometheus.firing("DeltafrontDown"), "DeltafrontDown fires")
    kube.until(lambda: len(ready_of(deployed, "door")) == 2, "both doors are back")
    prometheus.discover()
    kube.until(lambda: not prometheus.firing("DeltafrontDown"), "DeltafrontDown ends")


@contextmanager
def no_room(kube: Kube) -> Iterator[None]:
    """Keep new pods from every node."""
    nodes = names(kube.get("nodes"))
    try:
        kube("cordon", *nodes)
        yield
    finally:
        kube("uncordon", *nodes)
