"""Settings with which Ray listens on loopback and requires a token."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deltafront.service import listening

from ..strangers import listeners

BIND = """
import asyncio, grpc.aio
from deltafront.service.listening import grpc_at_loopback
grpc_at_loopback()

async def bound():
    server = grpc.aio.server()
    for at in ("[::]:0", "0.0.0.0:0", "127.0.0.2:0"):
        server.add_insecure_port(at)
    await server.start()
    print("listening", flush=True)
    await asyncio.sleep(600)

asyncio.run(bound())
"""


def test_each_start_makes_a_new_ray_token_unless_one_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    first, second = listening.token(), listening.token()
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == 64 and first != second
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of who looks inside")
    assert listening.token()["RAY_AUTH_TOKEN"] == "of who looks inside"


def test_ray_imported_earlier_binds_loopback_too() -> None:
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    with listening.at_loopback():
        assert ray_constants.ENABLE_RAY_CLUSTER is False
    assert ray_constants.ENABLE_RAY_CLUSTER is before


def test_workers_grpc_servers_bind_loopback_only() -> None:
    """Ray finds the hook by its name, in a process that has loaded none of our modules."""
    module, _, name = listening.loopback()["__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"].rpartition(".")
    assert (module, name) == ("deltafront.service.listening", "grpc_at_loopback")
    with subprocess.Popen([sys.executable, "-c", BIND], stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None and running.stdout.readline() == "listening\n"
            found = sorted(address for address, _, _ in listeners(running.pid))
        finally:
            running.kill()
    assert found == ["127.0.0.1", "127.0.0.1", "127.0.0.2"]


def test_addresses_are_written_with_their_ports() -> None:
    assert listening.joined("127.0.0.1", 9) == "127.0.0.1:9"
    assert listening.joined("::1", 9) == "[::1]:9"
    assert [listening.reachable(host) for host in ("0.0.0.0", "::", "10.0.0.7")] == [
        "127.0.0.1",
        "::1",
        "10.0.0.7",
    ]
