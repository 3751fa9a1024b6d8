"""What Ray and Serve are told on one machine: variables, ports, and time to start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltafront.service.config import ConfigError, parse
from deltafront.service.local import cleanup
from deltafront.service.local.local_ray import (
    _START_S,
    PROXY_PERIOD_S,
    _begin_serve,
    _in_one_line,
    _nothing_idle,
    _own_sigterm,
    agent_ports,
    check_gpus,
    check_ports,
    check_sockets,
    check_start,
    cpus,
    environment,
    inner_ports,
    slow_start,
)
from deltafront.service.local.start_errors import NotStarted

from ..test_config import content


def test_ray_gets_what_it_must_know_before_it_starts(tmp_path: Path) -> None:
    config = parse(content("prefill", groups=2, stages=20, cpus_per_stage=0.5))
    variables = environment(config, tmp_path)
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert variables["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] == str(config.door.max_message_bytes)
    assert variables["RAY_SERVE_HAPROXY_SOCKET_PATH"].startswith(str(tmp_path))
    assert cpus(config) >= 2 * 20 * 0.5 + 1


def test_what_the_caller_sets_for_ray_comes_before_the_quiet_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_enable_metrics_collection", raising=False)
    monkeypatch.setenv("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "2")
    variables = environment(parse(content()), tmp_path)
    assert variables["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] == "2"
    assert variables["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"] == str(PROXY_PERIOD_S)
    assert variables["RAY_enable_metrics_collection"] == "0"


@pytest.mark.parametrize("reuse", [False, True])
def test_a_taken_port_is_named(reuse: bool) -> None:
    with socket.socket() as taken:
        if reuse:  # as HAProxy does
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"door.http_port: port {port} cannot be used"):
            check_ports(parse(content("door", http_port=port, grpc_port=1025, metrics_port=1026)))


def test_gpus_that_are_not_there_are_named() -> None:
    given = content("prefill", stages=3, gpus_per_stage=0.1)
    given["decode"]["gpus"] = 0.7
    for found in (1.0, 8.0):
        check_gpus(parse(given), found)
    check_gpus(parse(content()), 0.0)
    with pytest.raises(ConfigError, match=r"decode\.gpus: 1 GPUs in all, but Ray finds 0 here"):
        check_gpus(parse(given), 0.0)


def test_services_beside_each_other_share_no_port() -> None:
    """The ranges of doors' servers end before their upper bound, as Serve reads them."""
    taken: set[int] = set()
    for grpc_port in range(9000, 9120):
        ports = {name: int(port) for name, port in inner_ports(grpc_port).items()}
        own = {port for name, port in ports.items() if "DIRECT_INGRESS" not in name}
        own |= set(agent_ports(grpc_port).values())
        for kind in ("HTTP", "GRPC"):
            least, end = (ports[f"RAY_SERVE_DIRECT_INGRESS_{bound}_{kind}_PORT"] for bound in ("MIN", "MAX"))
            assert end - least >= 45
            own |= set(range(least, end))
        assert len(own) == 100 and not own & taken
        taken |= own
    assert (min(taken), max(taken)) == (20_000, 31_999), "neither Ray's workers' ports nor those of clients"


def test_a_node_that_starts_slowly_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_node_that_ends_while_it_starts_is_not_waited_for(
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


def test_a_node_of_its_own_has_no_api_server_and_no_autoscaler(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import node, parameter

    asked: list[Any] = []
    monkeypatch.setattr(node.Node, "start_api_server", lambda *_parts, **named: asked.append(named))
    start = node.Node.start_api_server
    with slow_start(9000), _nothing_idle():
        node.Node.start_api_server(None, include_dashboard=False, raise_on_failure=False)
        assert parameter.RayParams().no_monitor and not asked
        assert parameter.RayParams().metrics_agent_port == agent_ports(9000)["metrics_agent_port"]
    assert node.Node.start_api_server is start and not parameter.RayParams().no_monitor


def test_a_node_waits_for_its_object_store_as_long_as_before(tmp_path: Path) -> None:
    variables = environment(parse(content()), tmp_path)
    attempts = int(variables["RAY_raylet_client_num_connect_attempts"])
    assert attempts * int(variables["RAY_raylet_client_connect_timeout_milliseconds"]) == 10 * 1000


def test_serve_begins_without_waiting_for_its_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither then nor when an application is run: Serve may replace one meanwhile."""
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

    assert callable(client.ServeControllerClient.wait_for_proxies_serving)  # which is what is replaced
    monkeypatch.setattr(api, "_create_controller_and_proxy_refs", create)
    monkeypatch.setattr(api, "_set_global_client", known.append)
    monkeypatch.setattr(client, "ServeControllerClient", Client)
    _begin_serve({"port": 1}, "grpc")
    assert begun == [({"port": 1}, "grpc")] and [one.controller for one in known] == ["controller"]
    known[0].wait_for_proxies_serving(wait_for_applications_running=False)


@pytest.mark.parametrize(
    ("variable", "constant"),
    [
        ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "PROXY_READY_CHECK_TIMEOUT_S"),
        ("RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S", "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S"),
    ],
)
def test_what_starts_slowly_has_the_whole_starts_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, constant: str
) -> None:
    """As Serve reads it: with its own 5 s, three of six starts on a busy machine died."""
    monkeypatch.delenv(variable, raising=False)
    variables = environment(parse(content()), tmp_path)
    asked = f"from ray.serve._private import constants; print(float(constants.{constant}))"
    told = {**os.environ, variable: variables[variable]}
    said = subprocess.run([sys.executable, "-c", asked], env=told, capture_output=True, text=True, check=True)
    assert float(said.stdout) == _START_S == 300


def test_rays_worker_and_control_store_have_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RAY_worker_register_timeout_seconds", "RAY_gcs_server_port_wait_time_s")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    variables = environment(parse(content()), tmp_path)
    assert {float(variables[name]) for name in names} == {_START_S}


def test_no_line_of_the_audit_log_is_left_out(tmp_path: Path) -> None:
    """Ray's driver takes lines that differ in their numbers only for one."""
    variables = environment(parse(content()), tmp_path)
    asked = "from ray._private import ray_constants; print(ray_constants.RAY_DEDUP_LOGS)"
    told = {**os.environ, **variables}
    said = subprocess.run([sys.executable, "-c", asked], env=told, capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


def test_a_port_of_what_is_dying_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = parse(content("door", http_port=port, grpc_port=1025, metrics_port=1026))
        monkeypatch.setattr(cleanup, "DYING_S", 0.01)
        with pytest.raises(ConfigError, match=r"^door.http_port"):
            check_start(settings)
        monkeypatch.setattr(cleanup, "DYING_S", 60.0)
        closing = threading.Timer(0.1, taken.close)
        closing.start()
        check_start(settings)
        closing.join()


def test_a_temporary_directory_with_too_long_a_name_is_named() -> None:
    check_sockets("/tmp")
    with pytest.raises(ConfigError, match=r"^TMPDIR: /scratch/of/somebody is too long a name"):
        check_sockets("/scratch/of/somebody")


def test_errors_of_ray_are_one_line_and_all_of_them_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    from ray.exceptions import ActorDiedError

    says = r"^a process ended while the service started \(ActorDiedError\); is there enough memory\?$"
    with pytest.raises(NotStarted, match=says), _in_one_line():
        raise ActorDiedError()
    assert "Traceback" in capsys.readouterr().err


def test_what_a_configuration_lacks_stays_what_it_is() -> None:
    with pytest.raises(ConfigError, match="a port"), _in_one_line():
        raise ConfigError("a port")


def test_what_a_signal_does_is_the_callers_business() -> None:
    """Also where Ray says otherwise meanwhile, and fails then."""

    def callers(_signal: int, _frame: object) -> None:
        raise AssertionError("nobody sends one")

    before = signal.signal(signal.SIGTERM, callers)
    try:
        with pytest.raises(RuntimeError, match="no Ray"), _own_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            raise RuntimeError("no Ray")
        assert signal.getsignal(signal.SIGTERM) is callers
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "port", [int(inner_ports(1025)["RAY_SERVE_HAPROXY_STATS_PORT"]), agent_ports(1025)["metrics_agent_port"]]
)
def test_a_taken_port_that_nobody_configured_is_named(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"door.grpc_port: port {port}, .* beside 1025, cannot"):
            check_ports(parse(content("door", http_port=1027, grpc_port=1025, metrics_port=1026)))
