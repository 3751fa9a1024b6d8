"""A start replaces private functions of Ray: it waits for a slow node, and starts no unneeded process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltafront.service.local.ports import agent_ports
from deltafront.service.local.ray_patches import minimal_node, slow_start, start_serve


def test_waits_for_a_node_that_starts_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import NodeID
    from ray._private import node, parameter, services

    answers: list[Any] = [
        RuntimeError("not registered yet"),
        RuntimeError("not registered yet"),
        {"is": "here"},
    ]
    started: list[list[str]] = []

    def get_node(_gcs: str, _node: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def start_raylet(_self: Any) -> None:
        started.append(sorted(path.name for path in tmp_path.iterdir()))

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(node.Node, "start_raylet", start_raylet)
    ports, number = agent_ports(9000), NodeID.from_random().hex()
    with slow_start(9000):
        assert services.get_node("gcs", number) == {"is": "here"} and not answers
        parameters = parameter.RayParams()
        assert {name: getattr(parameters, name) for name in ports} == ports
        made = SimpleNamespace(get_session_dir_path=lambda: str(tmp_path), node_id=number, all_processes={})
        node.Node.start_raylet(made)
    assert started == [sorted(f"{name}_{number}" for name in ports)], "before the raylet looks for them"
    for name, port in ports.items():
        assert (tmp_path / f"{name}_{number}").read_text().strip() == str(port)
    assert (services.get_node, node.Node.start_raylet) == (get_node, start_raylet)
    assert parameter.RayParams().metrics_agent_port is None


def test_stops_waiting_for_a_node_that_ends_while_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import NodeID
    from ray._private import node, services

    code: list[int | None] = [None]
    raylet = SimpleNamespace(process=SimpleNamespace(poll=lambda: code[0]))
    made = SimpleNamespace(
        get_session_dir_path=lambda: str(tmp_path),
        get_logs_dir_path=lambda: "logs",
        node_id=NodeID.from_random().hex(),
        all_processes={"raylet": [raylet]},
    )
    asked: list[str] = []

    def get_node(_gcs: str, number: str) -> Any:
        asked.append(number)
        if len(asked) == 3:
            code[0] = 1
        raise RuntimeError("not registered yet")

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(node.Node, "start_raylet", lambda _self: None)
    with slow_start(9000):
        node.Node.start_raylet(made)
        with pytest.raises(RuntimeError, match=r"ended while it started, with code 1: logs/raylet\.err"):
            services.get_node("gcs", made.node_id)
    assert len(asked) == 3


def test_local_ray_node_has_no_api_server_or_autoscaler(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import node, parameter

    asked: list[Any] = []
    monkeypatch.setattr(node.Node, "start_api_server", lambda *_parts, **named: asked.append(named))
    start = node.Node.start_api_server
    with slow_start(9000), minimal_node():
        node.Node.start_api_server(None, include_dashboard=False, raise_on_failure=False)
        assert parameter.RayParams().no_monitor and not asked
        assert parameter.RayParams().metrics_agent_port == agent_ports(9000)["metrics_agent_port"]
    assert node.Node.start_api_server is start and not parameter.RayParams().no_monitor


def test_serve_starts_without_waiting_for_its_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve may replace a proxy meanwhile. The same holds when an application is run."""
    from ray.serve._private import api, client

    begun: list[Any] = []
    known: list[Any] = []

    def create(*given: Any) -> tuple[str, list[str]]:
        begun.append(given[:2])
        return "controller", ["a proxy", "another"]

    class Client:
        def __init__(self, controller: str) -> None:
            self.controller = controller

        def wait_for_proxies_serving(self, wait_for_applications_running: bool = True) -> None:
            raise AssertionError("a proxy is waited for")

    assert callable(client.ServeControllerClient.wait_for_proxies_serving)  # the function that is replaced
    monkeypatch.setattr(api, "_create_controller_and_proxy_refs", create)
    monkeypatch.setattr(api, "_set_global_client", known.append)
    monkeypatch.setattr(client, "ServeControllerClient", Client)
    start_serve({"port": 1}, "grpc")
    assert begun == [({"port": 1}, "grpc")] and [one.controller for one in known] == ["controller"]
    known[0].wait_for_proxies_serving(wait_for_applications_running=False)
