"""Makes Ray and Serve listen on loopback, and makes Ray require an authentication token.

Ray 2.60 has few settings for this, so this module uses private parts (docs/decisions/0002 and 0019):

- RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 binds Ray's processes to loopback, as on desktops. Ray reads it at
import.
- Serve binds gRPC servers to `[::]`. So each worker process first runs `grpc_at_loopback`, named by a
  variable that is set here. A runtime environment would do the same, but would ask the node's agent at each
  start of a worker.
- Ray reads the token once, so `at_loopback` makes it read again.

Worker processes import this module, so it loads neither Ray nor gRPC.
"""

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
"""Wildcard address → address at which this machine reaches it."""


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str) -> str:
    """Return the address at which clients on this machine reach a server that listens at `host`."""
    return _EVERYWHERE.get(host, host)


def is_local(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def token() -> dict[str, str]:
    """Return variables that make Ray require a token: the environment's token or a new one, which no file
    contains."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
    }


def loopback() -> dict[str, str]:
    """Return variables that make Ray on one machine, and servers that its workers start, bind to loopback."""
    device = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USE_TLS": "0",
        _WORKER_HOOK: f"{grpc_at_loopback.__module__}.{grpc_at_loopback.__name__}",
        "GLOO_SOCKET_IFNAME": device,
        "NCCL_SOCKET_IFNAME": device,
        "UCX_NET_DEVICES": device,
    }


@contextlib.contextmanager
def at_loopback() -> Iterator[None]:
    """Apply the variables to this process's Ray, which may have been imported before they were set."""
    from unittest.mock import patch

    from ray._private import ray_constants

    with patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False):
        read_token()
        yield


def read_token() -> None:
    """Make Ray in this process read its authentication token (RAY_AUTH_TOKEN) again."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def grpc_at_loopback() -> None:
    """Make this process's gRPC servers without TLS listen on loopback only.

    Ray runs this function in each worker process, which ends if the function fails.
    """
    from grpc.aio import _server

    add = _server.Server.add_insecure_port

    def add_at_loopback(self: Any, address: str) -> int:
        host, _, port = address.rpartition(":")
        return int(add(self, f"{LOOPBACK}:{port}" if host.strip("[]") in _EVERYWHERE else address))

    _server.Server.add_insecure_port = add_at_loopback  # type: ignore[method-assign]
