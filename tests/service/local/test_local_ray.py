"""Settings of Ray and Serve on one machine, checks before a start, and failed starts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deltafront.service.config import ConfigError, parse
from deltafront.service.local import cleanup, local_ray
from deltafront.service.local.local_ray import (
    PROXY_PERIOD_S,
    RayProcesses,
    _keep_sigterm_handler,
    _start_errors,
    check_gpus,
    check_socket_paths,
    cpus,
    prepare,
    ray_environment,
    running,
)
from deltafront.service.local.ray_patches import START_S
from deltafront.service.local.readiness import StartError
from deltafront.workers import waits

from ..inprocess import HANG_S
from ..test_config import content


def test_ray_environment_is_set_before_ray_starts(tmp_path: Path) -> None:
    config = parse(content("prefill", groups=2, stages=20, cpus_per_stage=0.5))
    variables = ray_environment(config, tmp_path)
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert variables["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] == str(config.door.max_message_bytes)
    assert variables["RAY_SERVE_HAPROXY_SOCKET_PATH"].startswith(str(tmp_path))
    assert cpus(config) >= 2 * 20 * 0.5 + 1


def test_callers_ray_variables_override_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_enable_metrics_collection", raising=False)
    monkeypatch.setenv("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "2")
    variables = ray_environment(parse(content()), tmp_path)
    assert variables["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] == "2"
    assert variables["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"] == str(PROXY_PERIOD_S)
    assert variables["RAY_enable_metrics_collection"] == "0"


def test_error_names_missing_gpus() -> None:
    given = content("prefill", stages=3, gpus_per_stage=0.1)
    given["decode"]["gpus"] = 0.7
    for found in (1.0, 8.0):
        check_gpus(parse(given), found)
    check_gpus(parse(content()), 0.0)
    with pytest.raises(ConfigError, match=r"decode\.gpus: 1 GPUs in all, but Ray finds 0 here"):
        check_gpus(parse(given), 0.0)
    given["decode"] |= {"tensor_parallel": 4, "gpus": 1}
    with pytest.raises(ConfigError, match=r"decode\.gpus: 4\.3 GPUs in all, but Ray finds 4 here"):
        check_gpus(parse(given), 4.0)
    given["decode"] |= {"gpus": 0, "device": "cuda"}
    check_gpus(parse(given), 4.0)
    with pytest.raises(ConfigError, match=r"decode\.tensor_parallel: .* 4 ranks .* finds 2 here"):
        check_gpus(parse(given), 2.0)


def test_ray_node_keeps_its_object_store_timeout(tmp_path: Path) -> None:
    variables = ray_environment(parse(content()), tmp_path)
    attempts = int(variables["RAY_raylet_client_num_connect_attempts"])
    assert attempts * int(variables["RAY_raylet_client_connect_timeout_milliseconds"]) == 10 * 1000


def test_serve_proxies_have_the_whole_start_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads the constants in Serve itself. With Serve's own 5 s, three of six starts on a busy machine
    failed."""
    named = {
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "PROXY_READY_CHECK_TIMEOUT_S",
        "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S",
    }
    for variable in named:
        monkeypatch.delenv(variable, raising=False)
    variables = ray_environment(parse(content()), tmp_path)
    read = ", ".join(f"constants.{constant}" for constant in named.values())
    asked = f"from ray.serve._private import constants; print({read})"
    told = {**os.environ, **{variable: variables[variable] for variable in named}}
    said = subprocess.run([sys.executable, "-c", asked], env=told, capture_output=True, text=True, check=True)
    assert [float(seconds) for seconds in said.stdout.split()] == [START_S] * len(named)
    assert START_S == 300


def test_ray_workers_and_control_store_have_the_whole_start_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("RAY_worker_register_timeout_seconds", "RAY_gcs_server_port_wait_time_s")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    variables = ray_environment(parse(content()), tmp_path)
    assert {float(variables[name]) for name in names} == {START_S}


def test_ray_does_not_deduplicate_audit_log_lines(tmp_path: Path) -> None:
    """Ray's driver treats lines that differ only in numbers as the same."""
    variables = ray_environment(parse(content()), tmp_path)
    asked = "from ray._private import ray_constants; print(ray_constants.RAY_DEDUP_LOGS)"
    told = {**os.environ, **variables}
    said = subprocess.run([sys.executable, "-c", asked], env=told, capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


def test_waits_for_a_port_that_a_dying_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = parse(content("door", http_port=port, grpc_port=1025, metrics_port=1026))
        monkeypatch.setattr(cleanup, "EXIT_S", 0.01)
        with pytest.raises(ConfigError, match=r"^door.http_port"):
            prepare(settings)
        monkeypatch.setattr(cleanup, "EXIT_S", 60.0)
        closing = threading.Timer(0.1, taken.close)
        closing.start()
        prepare(settings)
        closing.join()


def test_error_names_a_too_long_temporary_directory() -> None:
    check_socket_paths("/tmp")
    with pytest.raises(ConfigError, match=r"^TMPDIR: /scratch/of/somebody is too long a name"):
        check_socket_paths("/scratch/of/somebody")


def test_ray_errors_are_one_line_with_the_traceback_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    from ray.exceptions import ActorDiedError

    says = r"^a process ended while the service started \(ActorDiedError\); is there enough memory\?$"
    with pytest.raises(StartError, match=says), _start_errors():
        raise ActorDiedError()
    assert "Traceback" in capsys.readouterr().err


def test_configuration_errors_keep_their_type_and_text() -> None:
    with pytest.raises(ConfigError, match="a port"), _start_errors():
        raise ConfigError("a port")


def test_keeps_the_callers_sigterm_handler() -> None:
    """Holds even if Ray replaces the handler and then raises."""

    def callers(_signal: int, _frame: object) -> None:
        raise AssertionError("nobody sends one")

    before = signal.signal(signal.SIGTERM, callers)
    try:
        with pytest.raises(RuntimeError, match="no Ray"), _keep_sigterm_handler():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            raise RuntimeError("no Ray")
        assert signal.getsignal(signal.SIGTERM) is callers
    finally:
        signal.signal(signal.SIGTERM, before)


def test_logs_which_processes_a_slow_stop_waits_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray
    from ray import serve

    children: list[subprocess.Popen[bytes]] = []
    terminal, said = Console(stderr=True), threading.Event()
    say = terminal.print

    def tell(*line: Any, **options: Any) -> None:
        say(*line, **options)
        said.set()

    def start(_settings: Any, folder: Path) -> RayProcesses:
        with (folder / "raylet.out").open("w") as output:
            children.append(subprocess.Popen(["sleep", "600"], stdout=output))
        return RayProcesses({})

    def shut_down() -> None:
        assert said.wait(HANG_S)

    monkeypatch.setattr(terminal, "print", tell)
    monkeypatch.setattr(local_ray, "prepare", lambda _settings: None)
    monkeypatch.setattr(local_ray, "_start_ray", start)
    monkeypatch.setattr(local_ray, "_start_application", lambda *_: None)
    monkeypatch.setattr(serve, "shutdown", shut_down)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(waits, "SLOW_S", 0.01)
    with running(parse(content()), terminal=terminal):
        assert not said.is_set()
    (child,) = children
    assert child.wait(HANG_S) == -signal.SIGKILL
    assert "after 0.01 s, waits for 1 sleep to stop" in capfd.readouterr().err
