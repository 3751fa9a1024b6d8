"""Who reaches what: network policies and monitors against the pods they select."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from .manifests import OVERLAYS, Object, container, of_kind, rendered, templates, worker_groups

KUBERAY_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080, "serve": 8000}
"""KubeRay's own of a head that names none. Of these, workers get the metrics port."""
STRANGERS = ({"app.kubernetes.io/name": "kuberay-operator"}, {"app.kubernetes.io/name": "prometheus"})
"""Pods of the operators, as their charts label them."""
CLEANUP = {"ray.io/node-type": "redis-cleanup"}
"""KubeRay's Job after a cluster with Redis was deleted."""
MONITORED = [name for name in OVERLAYS if name != "cpu"]

Labels = dict[str, str]
Pods = list[tuple[Labels, dict[str, int]]]


def pods(overlay: str) -> Pods:
    """Labels, as KubeRay completes them, and ports of every kind of pod."""
    found: Pods = []
    for name, template in templates(overlay).items():
        worker = name in worker_groups(overlay)
        labels = template["metadata"]["labels"] | {
            "ray.io/is-ray-node": "yes",
            "ray.io/node-type": "worker" if worker else "head",
            "ray.io/group": name if worker else "headgroup",
        }
        own = {"metrics": KUBERAY_PORTS["metrics"]} if worker else KUBERAY_PORTS
        found.append((labels, own | ports_of(template)))
    for one in of_kind(rendered(f"overlays/{overlay}"), "StatefulSet"):
        template = one["spec"]["template"]
        found.append((template["metadata"]["labels"], ports_of(template)))
    return found


def ports_of(template: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(template).get("ports", [])}


def selected(overlay: str, selector: Object) -> Pods:
    return [one for one in pods(overlay) if selector["matchLabels"].items() <= one[0].items()]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_open_ports_that_pods_listen_on(overlay: str) -> None:
    for policy in of_kind(rendered(f"overlays/{overlay}"), "NetworkPolicy"):
        name, spec = policy["metadata"]["name"], policy["spec"]
        chosen = selected(overlay, spec["podSelector"])
        assert chosen, f"{name} selects no pod"
        listening = {number for _labels, ports in chosen for number in ports.values()}
        opened = {port["port"] for rule in spec["ingress"] for port in rule.get("ports", [])}
        assert opened <= listening, f"{name} opens ports on which nothing listens"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_has_a_policy_and_every_peer_is_a_pod(overlay: str) -> None:
    policies = [one["spec"] for one in of_kind(rendered(f"overlays/{overlay}"), "NetworkPolicy")]
    for labels, _ports in pods(overlay):
        assert any(one["podSelector"]["matchLabels"].items() <= labels.items() for one in policies), labels
    peers = [peer for one in policies for rule in one["ingress"] for peer in rule["from"]]
    for peer in peers:
        if "podSelector" not in peer:
            assert peer["namespaceSelector"]["matchLabels"] == {"deltafront/clients": "yes"}
        elif "namespaceSelector" in peer:
            assert peer["podSelector"]["matchLabels"] in STRANGERS
        else:
            assert peer["podSelector"]["matchLabels"] == CLEANUP or selected(overlay, peer["podSelector"])


def monitors(overlay: str) -> Iterator[tuple[str, Pods, int]]:
    """For each endpoint of a PodMonitor: the job that the Prometheus operator makes of it, the pods that it
    selects, and its port, the same on each of them."""
    for one in of_kind(rendered(f"overlays/{overlay}"), "PodMonitor"):
        metadata, spec = one["metadata"], one["spec"]
        chosen = selected(overlay, spec["selector"])
        for endpoint in spec["podMetricsEndpoints"]:
            (port,) = {ports[endpoint["port"]] for _labels, ports in chosen}
            yield f"{metadata['namespace']}/{metadata['name']}", chosen, port


@pytest.mark.parametrize("overlay", MONITORED)
def test_metrics_are_scraped_from_every_pod_through_a_policy(overlay: str) -> None:
    scraped = {
        (labels["ray.io/group"], port) for _job, chosen, port in monitors(overlay) for labels, _ in chosen
    }
    metrics = KUBERAY_PORTS["metrics"]
    assert scraped == {
        ("door", 9464),
        ("headgroup", metrics),
        *((n, metrics) for n in worker_groups(overlay)),
    }
    for policy in of_kind(rendered(f"overlays/{overlay}"), "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            if any(STRANGERS[1] == peer.get("podSelector", {}).get("matchLabels") for peer in rule["from"]):
                groups = {
                    labels["ray.io/group"] for labels, _ in selected(overlay, policy["spec"]["podSelector"])
                }
                scraped -= {(group, port["port"]) for group in groups for port in rule["ports"]}
    assert not scraped, "no policy lets Prometheus in"


@pytest.mark.parametrize("overlay", MONITORED)
def test_alerts_on_jobs_name_jobs_that_exist(overlay: str) -> None:
    (rules,) = of_kind(rendered(f"overlays/{overlay}"), "PrometheusRule")
    patterns = re.findall(r'job=~"([^"]+)"', str(rules["spec"]))
    assert patterns
    for pattern in patterns:
        (chosen,) = [chosen for job, chosen, _port in monitors(overlay) if re.fullmatch(pattern, job)]
        assert [labels["ray.io/group"] for labels, _ports in chosen] == ["door"], (
            "DeltafrontDoorDown is on doors"
        )
