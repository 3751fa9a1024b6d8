"""Network policies and monitors, compared with the pods that they select."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from .manifests import (
    OVERLAYS,
    Object,
    container,
    of_kind,
    pod_templates,
    rendered,
    templates,
    worker_groups,
)

KUBERAY_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080, "serve": 8000}
"""KubeRay's default ports of a head. Workers get only the metrics port."""
STRANGERS = ({"app.kubernetes.io/name": "kuberay-operator"}, {"app.kubernetes.io/name": "prometheus"})
"""Labels of the operators' pods: KubeRay's in this namespace, Prometheus in its own."""
NAMES = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
    "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
}
MONITORED = [name for name in OVERLAYS if name != "cpu"]

Labels = dict[str, str]
Pods = list[tuple[Labels, dict[str, int]]]


def pods(overlay: str) -> Pods:
    """Return labels, with those that KubeRay adds, and ports of every kind of pod: Ray's, KubeRay's cleanup
    Job, and others."""
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
    head, ports = found[0]
    found.append((head | {"ray.io/node-type": "redis-cleanup"}, ports))
    for name in {"model", "redis"} & pod_templates(overlay).keys():
        template = pod_templates(overlay)[name]
        found.append((template["metadata"]["labels"], ports_of(template)))
    return found


def ports_of(template: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(template).get("ports", [])}


def selected(overlay: str, selector: Object) -> Pods:
    return [one for one in pods(overlay) if selects(selector, one[0])]


def selects(selector: Object, labels: Labels) -> bool:
    """Return whether a selector matches. Supports matchLabels and the operator In, which are all that the
    manifests use."""
    among = selector.get("matchExpressions", [])
    assert {one["operator"] for one in among} <= {"In"}
    among = [(one["key"], one["values"]) for one in among]
    exact = [(key, [value]) for key, value in selector["matchLabels"].items()]
    return all(labels.get(key) in values for key, values in exact + among)


def policies(overlay: str) -> list[Object]:
    return [one["spec"] for one in of_kind(rendered(f"overlays/{overlay}"), "NetworkPolicy")]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_open_ports_that_pods_listen_on(overlay: str) -> None:
    for policy in of_kind(rendered(f"overlays/{overlay}"), "NetworkPolicy"):
        name, spec = policy["metadata"]["name"], policy["spec"]
        chosen = selected(overlay, spec["podSelector"])
        assert chosen, f"{name} selects no pod"
        listening = {number for _labels, ports in chosen for number in ports.values()}
        opened = {port["port"] for rule in spec.get("ingress", []) for port in rule.get("ports", [])}
        assert opened <= listening, f"{name} opens ports on which nothing listens"


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("direction", ["Ingress", "Egress"])
def test_every_pod_has_a_policy_in_both_directions(overlay: str, direction: str) -> None:
    """Without a policy, all connections are permitted."""
    for labels, _ports in pods(overlay):
        assert any(
            direction in one["policyTypes"] and selects(one["podSelector"], labels)
            for one in policies(overlay)
        ), labels


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_network_policy_peers_are_selected_pods_or_named_namespaces(overlay: str) -> None:
    """An empty selector would permit all namespaces."""
    rules = [rule for one in policies(overlay) for rule in one.get("ingress", [])]
    assert all(rule["from"] for rule in rules)
    for peer in [peer for rule in rules for peer in rule["from"]]:
        namespace = peer.get("namespaceSelector")
        if "podSelector" not in peer:
            assert namespace["matchLabels"] == {"deltafront/clients": "yes"}
        elif namespace is not None:
            assert namespace["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
            assert peer["podSelector"]["matchLabels"] == STRANGERS[1]
        else:
            assert peer["podSelector"].get("matchLabels") == STRANGERS[0] or selected(
                overlay, peer["podSelector"]
            )


def reached(overlay: str, labels: Labels) -> list[tuple[Object | None, set[int]]]:
    """Return the peers of a pod's egress rules, and their ports. None: any peer; no ports: all ports."""
    found: list[tuple[Object | None, set[int]]] = []
    for policy in policies(overlay):
        if "Egress" in policy["policyTypes"] and selects(policy["podSelector"], labels):
            for rule in policy["egress"]:
                ports = {port["port"] for port in rule.get("ports", [])}
                found += [(peer, ports) for peer in rule.get("to", [None])]
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_let_pods_reach_only_what_they_need(overlay: str) -> None:
    """Ray's pods reach each other and a collector of spans; head and cleanup Job reach Redis; the model's Job
    reaches the hub. All reach DNS. No pod with prompts reaches the internet."""
    for labels, _ports in pods(overlay):
        peers = reached(overlay, labels)
        named = [peer for peer, _ in peers if peer and "namespaceSelector" in peer]
        inside = [peer for peer, _ in peers if peer and "namespaceSelector" not in peer]
        among = [one for peer in inside for one, _ in selected(overlay, peer["podSelector"])]
        if labels.get("deltafront/role") == "redis":
            assert peers == []
            continue
        assert NAMES in named and (NAMES, {53}) in peers
        if labels.get("deltafront/role") == "model":
            assert [ports for peer, ports in peers if peer is None] == [{443}]
            assert not among
            continue
        collectors = [one for one in named if one != NAMES]
        assert collectors == [{"namespaceSelector": {"matchLabels": {"deltafront/collector": "yes"}}}]
        assert all(peer is not None for peer, _ in peers)
        assert {one["ray.io/group"] for one in among if "ray.io/group" in one} == {
            "headgroup",
            *worker_groups(overlay),
        }
        redis = any(one.get("deltafront/role") == "redis" for one in among)
        assert redis == (labels["ray.io/node-type"] in ("head", "redis-cleanup"))


def monitors(overlay: str) -> Iterator[tuple[str, Pods, int]]:
    """Return for each endpoint of a PodMonitor: its Prometheus job, the selected pods, and its port, which is
    the same on all of them."""
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
        for rule in policy["spec"].get("ingress", []):
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
