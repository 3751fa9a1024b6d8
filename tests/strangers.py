"""Attacks by a process on this machine without the service's token, and the addresses at which the service
listens."""

from __future__ import annotations

import ipaddress
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil

Listener = tuple[str, int, str]
"""Address, port and the process's name."""

RUN_CODE = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("inside", ray.get(ray.remote(lambda: 42).remote()))
"""
_QUIET_S = 30.0


def listeners(pid: int) -> Iterator[Listener]:
    """Return the TCP listeners of a process and its descendants."""
    first = psutil.Process(pid)
    for process in [first, *first.children(recursive=True)]:
        try:
            name = " ".join(process.cmdline()[:2])
            found = process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        for one in found:
            if one.status == psutil.CONN_LISTEN:
                yield _address(one.laddr.ip), one.laddr.port, name


def _address(ip: str) -> str:
    """Return an address, with IPv4 addresses in one form."""
    given = ipaddress.ip_address(ip)
    return str(getattr(given, "ipv4_mapped", None) or given)


def uninvited(pid: int, named: set[tuple[str, int]]) -> list[Listener]:
    """Return the listeners beyond loopback that are not expected."""
    return [
        one for one in listeners(pid) if not ipaddress.ip_address(one[0]).is_loopback and one[:2] not in named
    ]


def run_code(address: str, home: Path, **variables: str) -> str:
    """Join Ray at `address` and run code. Return Ray's output. variables: for Ray's token."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    theirs = {
        "HOME": str(home),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # otherwise Ray uses another address than loopback
        "RAY_NUM_REDIS_GET_RETRIES": "2",  # number of tries, one per second
    }
    command = [sys.executable, "-c", RUN_CODE, address]
    done = subprocess.run(
        command, env=ours | theirs | variables, capture_output=True, text=True, timeout=600, check=False
    )
    return done.stdout + done.stderr


class Opened:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self._path), os.O_CREAT)


def send_pickle(port: int, path: Path, token: str = "") -> grpc.StatusCode:
    """Send a pickle that makes a file at `path` to a replica's server for Serve's own calls. Return the
    answer."""
    from ray.serve.generated import serve_pb2, serve_pb2_grpc  # Ray reads its environment at import

    request = serve_pb2.ASGIRequest(pickled_request_metadata=pickle.dumps(Opened(path)))
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = serve_pb2_grpc.ASGIServiceStub(channel)
        try:
            stub.HandleRequest(request, timeout=_QUIET_S, metadata=metadata)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK
