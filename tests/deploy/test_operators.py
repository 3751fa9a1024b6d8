"""Logs of pods, and the sample in which one request in a hundred goes to a new version."""

from __future__ import annotations

import pytest

from .manifests import OVERLAYS, container, of_kind, rendered, templates

SERVED, NEXT = "deltafront", "deltafront-canary"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_write_json_logs_to_their_output(overlay: str) -> None:
    """Collectors and `kubectl logs` read the output. Files in /tmp are lost with the pod."""
    for template in templates(overlay).values():
        environment = {one["name"]: one["value"] for one in container(template)["env"]}
        assert environment["RAY_LOG_TO_STDERR"] == "1"
        assert environment["RAY_LOGGING_CONFIG_ENCODING"] == "JSON"


@pytest.mark.parametrize(("kind", "port"), [("GRPCRoute", 9000), ("HTTPRoute", 8000)])
def test_one_request_in_a_hundred_goes_to_the_new_version(kind: str, port: int) -> None:
    (route,) = of_kind(rendered("canary/traffic"), kind)
    (before,) = of_kind(rendered("gateway"), kind)
    (rule,), (rule_before,) = route["spec"]["rules"], before["spec"]["rules"]
    service = {"name": SERVED, "port": port}
    assert rule["backendRefs"] == [
        service | {"weight": 99},
        service | {"namespace": NEXT, "weight": 1},
    ]
    assert route | {"spec": 0} == before | {"spec": 0} and rule | {"backendRefs": 0} == rule_before | {
        "backendRefs": 0
    }


def test_gateway_routes_may_send_requests_to_the_new_version() -> None:
    objects = rendered("canary/service")
    (grant,) = of_kind(objects, "ReferenceGrant")
    assert {(one["kind"], one["namespace"]) for one in grant["spec"]["from"]} == {
        ("GRPCRoute", SERVED),
        ("HTTPRoute", SERVED),
    }
    (to,) = grant["spec"]["to"]
    assert to["name"] in {one["metadata"]["name"] for one in of_kind(objects, "Service")}


def test_new_version_is_an_overlay_in_its_own_namespace() -> None:
    """Both versions have the same labels, by which Services and policies of a namespace select pods."""
    objects, overlay = rendered("canary/service"), rendered("overlays/one-gpu")
    assert {one["metadata"]["namespace"] for one in objects} == {NEXT}
    (new,), (old,) = of_kind(objects, "RayService"), of_kind(overlay, "RayService")
    assert new["spec"]["serveConfigV2"] == old["spec"]["serveConfigV2"]
    images = {
        one["image"]
        for group in new["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        for one in group["template"]["spec"]["containers"]
    }
    assert images == {"deltafront:gpu-next"}
    assert not of_kind(objects, "PrometheusRule"), "alerts would fire twice"
    assert {one["metadata"]["name"] for one in of_kind(objects, "ConfigMap")} == {"deltafront-model"}


def test_operator_in_the_served_namespace_reaches_the_new_version() -> None:
    policies = of_kind(rendered("canary/service"), "NetworkPolicy")
    (policy,) = (one for one in policies if one["metadata"]["name"] == "deltafront-cluster")
    peers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
    operator = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    (found,) = (peer for peer in peers if peer["podSelector"] == operator)
    assert found["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": SERVED}}
