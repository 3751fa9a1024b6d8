"""Where servers of this machine listen: at addresses that the configuration names, and Ray's at loopback.

Ray and Serve 2.60 have no setting for most of it, so all that is private to them stands here, and a newer Ray
has to be looked at (docs/decisions/0002 and 0019):

- RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, Ray's way on desktops: control store, node, workers and agents bind
  loopback. Ray reads it at import, so `at_loopback` also sets what was read.
- Serve binds the gRPC servers of doors, replicas and the fallback proxy to `[::]`. Every worker process runs
  `grpc_at_loopback` before anything else. Ray would have a worker's hook in a runtime environment, for which
  the node's agent is asked each time; the variable that the agent would set is set here for all of them.
- A token is made for each start. Ray reads it from the environment once, so `at_loopback` has it read again.

Importing this loads neither Ray nor gRPC: worker processes do it when they start.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

LOOPBACK = "127.0.0.1"
_WORKER_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
_EVERYWHERE = {"0.0.0.0": LOOPBACK, "::": "::1"}
"""Addresses that stand for all, and how this machine reaches what listens there."""


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str) -> str:
    """Where a client on this machine finds what listens at `host`."""
    return _EVERYWHERE.get(host, host)


def is_local(host: str) -> bool:
    """Whether nobody but this machine's own processes can reach the address."""
    return ipaddress.ip_address(host).is_loopback


def token() -> dict[str, str]:
    """Variables with which Ray's processes refuse whoever does not have the token: the caller's, or a new
    one. It is in no file."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
    }


def loopback() -> dict[str, str]:
    """Variables with which a Ray of one machine, and what its workers start, listen at loopback."""
    device = _loopback_device()
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USE_TLS": "0",
        _WORKER_HOOK: f"{grpc_at_loopback.__module__}.{grpc_at_loopback.__name__}",
        "GLOO_SOCKET_IFNAME": device,
        "NCCL_SOCKET_IFNAME": device,
        "UCX_NET_DEVICES": device,
    }


def _loopback_device() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


@contextlib.contextmanager
def at_loopback() -> Iterator[None]:
    """For whoever starts a Ray in this block, with the variables of `token` and `loopback` set: this process
    may have imported Ray before they were."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    read_token()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def read_token() -> None:
    """Ray in this process goes by the environment's token from now on."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def grpc_at_loopback() -> None:
    """From now on gRPC servers of this process that would listen everywhere, in the clear, listen at
    loopback. Ray runs it in every worker process; a worker in which it fails ends."""
    from grpc.aio import _server

    add = _server.Server.add_insecure_port

    def add_at_loopback(self: Any, address: str) -> int:
        return int(add(self, _at_loopback(address)))

    _server.Server.add_insecure_port = add_at_loopback  # type: ignore[method-assign]


def _at_loopback(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{LOOPBACK}:{port}" if host.strip("[]") in _EVERYWHERE else address
