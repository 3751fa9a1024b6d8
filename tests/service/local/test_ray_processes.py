"""The end of one of Ray's own processes is reported in plain words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from deltafront.service.local.local_ray import RayProcesses


@pytest.fixture
def node() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that runs until its standard input ends."""
    with subprocess.Popen([sys.executable, "-c", "exit(int(input()))"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_reports_no_failure_while_all_processes_live(node: subprocess.Popen[bytes]) -> None:
    assert RayProcesses({"gcs_server": node, "raylet": node}).failure() is None


def test_failure_names_a_killed_ray_control_store(node: subprocess.Popen[bytes]) -> None:
    processes = RayProcesses({"gcs_server": node})
    node.kill()
    assert processes.wait_for_failure() == "Ray's control store (gcs_server) was ended by SIGKILL"


def test_failure_names_the_ended_ray_process_and_its_exit_code(node: subprocess.Popen[bytes]) -> None:
    node.communicate(b"3\n")
    assert RayProcesses({"raylet": node}).wait_for_failure() == "Ray's node (raylet) ended with code 3"
