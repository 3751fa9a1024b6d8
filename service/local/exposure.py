"""Ports of a service that processes of other machines can reach."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import DoorConfig
from ..listening import is_local, joined


def listens(door: DoorConfig) -> Iterator[tuple[str, str, int]]:
    """Purpose, host and port of every port that a configuration names. All others are at loopback."""
    yield "gRPC", door.host, door.grpc_port
    yield "OpenAI", door.host, door.http_port
    if door.tls_certificate is not None:
        yield "gRPC with TLS", door.host, door.tls_port
    yield "metrics", door.metrics_at, door.metrics_port


def exposed(door: DoorConfig) -> str:
    """A line with every address that is open beyond loopback, and whether a token is asked for there."""
    named = [f"{what} {joined(host, port)}" for what, host, port in listens(door) if not is_local(host)]
    if not named:
        return "to this machine alone"
    who = "anybody may call" if door.tokens_file is None else "requests need a token"
    return f"beyond this machine: {', '.join(named)}; {who}"
