"""Redis and the head that needs it: the password, and the head's wait for Redis."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from ray._private import services
from ray.scripts import scripts

from .manifests import container, pod_templates, templates


def test_ray_takes_the_redis_password_only_as_an_argument() -> None:
    """docs/deploy.md says so. If this test fails, Ray may have another way."""
    assert "--redis_password={redis_password}" in inspect.getsource(services.start_gcs_server)
    assert "--redis-password={redis_password}" in inspect.getsource(services.start_raylet)
    assert "envvar" not in inspect.getsource(scripts)
    with pytest.raises(TypeError):
        services.get_address("redis://:secret@redis:6379")


def test_redis_gets_its_password_outside_its_arguments(tmp_path: Path) -> None:
    """Runs the manifest's own command, with a program instead of Redis that records its arguments and
    input."""
    pod = container(pod_templates("cpu")["redis"])
    assert "args" not in pod
    program = tmp_path / "redis-server"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat > {tmp_path}/configuration\n')
    program.chmod(0o700)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REDIS_PASSWORD": "a password"}
    subprocess.run(pod["command"], env=environment, check=True)
    assert (tmp_path / "arguments").read_text() == "-\n"
    configuration = (tmp_path / "configuration").read_text().splitlines()
    assert configuration == ['requirepass "a password"', "appendonly yes"]


def test_redis_asks_for_its_password(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: redis-server)")
    pod = container(pod_templates("cpu")["redis"])
    command = [*pod["command"][:-1], pod["command"][-1].replace("appendonly yes", "port 0\nunixsocket redis")]
    server = subprocess.Popen(command, env={**os.environ, "REDIS_PASSWORD": "secret"}, cwd=tmp_path)
    try:
        assert answer_of_redis(tmp_path / "redis", "PING").startswith("-NOAUTH")
        assert answer_of_redis(tmp_path / "redis", "AUTH secret").startswith("+OK")
    finally:
        server.terminate()
        server.wait(60)


def answer_of_redis(path: Path, command: str) -> str:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, "Redis does not listen"
        time.sleep(0.05)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(f"{command}\r\n".encode())
        return connection.recv(1000).decode()


class Answering(threading.Thread):
    """Answers the first line of a connection like Redis without the password."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._server = socket.create_server(("127.0.0.1", port))

    def run(self) -> None:
        connection, _ = self._server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"-NOAUTH Authentication required.\r\n")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_ray_head_prints_that_it_waits_for_redis() -> None:
    """Runs the manifest's own command with an unknown name, a port without a listener, and then an answer."""
    command = container(templates("cpu")["head"])["command"]
    start = {
        "PATH": "/usr/bin:/bin",
        "KUBERAY_GEN_RAY_START_CMD": "ulimit -n 64; echo ray start $REDIS_PASSWORD",
    }
    # A worker's container has no variables for Redis. The start command expands the variables that KubeRay
    # leaves to the shell.
    worker = subprocess.run(
        command, env=start | {"REDIS_PASSWORD": "x"}, capture_output=True, text=True, check=False
    )
    assert worker.stdout == "exec ray start x\n"
    port = free_port()
    for address, reason in (("none.invalid:6379", "not known|resolution"), (f"127.0.0.1:{port}", "refused")):
        head = subprocess.Popen(
            command, env=start | {"RAY_REDIS_ADDRESS": address}, stdout=subprocess.PIPE, text=True
        )
        assert head.stdout is not None
        line = head.stdout.readline()
        assert line.startswith(f"waits for Redis at {address}: ") and re.search(reason, line), line
        if address.startswith("127"):
            Answering(port).start()
            assert head.wait(60) == 0 and "ray start" in head.stdout.read()
        head.kill()
        head.wait()
