"""Clients that are servers themselves, on a free port."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

START_S = 300


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def serving(command: Sequence[str | Path], health: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Start a server, wait until it answers at the address `health`, and kill it at the end of the block. Its
    output goes to stderr, because rows are read from stdout."""
    server = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    try:
        _wait(server, health)
        yield
    finally:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes], health: str) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            httpx.get(health).raise_for_status()
            return
        except httpx.HTTPError:
            assert server.poll() is None and time.monotonic() < until, "the server did not start"
            time.sleep(0.2)
