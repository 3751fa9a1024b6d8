"""The ports of a service on one machine.

Ports without a configuration key are in a block that is chosen by the gRPC port.
"""

import socket
from collections.abc import Iterator

from deltafront.service.config import ConfigError
from deltafront.service.listening import LOOPBACK, is_local, joined
from deltafront.service.settings import DoorConfig

_FIRST_BLOCK, _BLOCKS, _BLOCK_PORTS = 20_000, 120, 100
"""The blocks are between the ports of Ray's workers and the kernel's ports for clients."""
_SERVE_PORTS = """RAY_SERVE_HAPROXY_STATS_PORT RAY_SERVE_HAPROXY_METRICS_PORT
    RAY_SERVE_FALLBACK_PROXY_HTTP_PORT RAY_SERVE_FALLBACK_PROXY_GRPC_PORT""".split()
_AGENT_PORTS = """metrics_agent_port metrics_export_port dashboard_agent_listen_port
    runtime_env_agent_port""".split()


def public_ports(door: DoorConfig) -> Iterator[tuple[str, str, str, int]]:
    """Yield purpose, key, host and port of each configured port. All other ports are on loopback."""
    yield "gRPC", "grpc_port", door.host, door.grpc_port
    yield "OpenAI", "http_port", door.host, door.http_port
    if door.tls_certificate is not None:
        yield "gRPC with TLS", "tls_port", door.host, door.tls_port
    yield "metrics", "metrics_port", door.metrics_at, door.metrics_port


def describe_exposure(door: DoorConfig) -> str:
    """Describe which addresses other machines can reach, and whether requests need a token."""
    ports = public_ports(door)
    exposed = [f"{purpose} {joined(host, port)}" for purpose, _, host, port in ports if not is_local(host)]
    if not exposed:
        return "to this machine alone"
    access = "anybody may call" if door.tokens_file is None else "requests need a token"
    return f"beyond this machine: {', '.join(exposed)}; {access}"


def serve_ports(grpc_port: int) -> dict[str, str]:
    """Return Ray Serve's internal ports, by environment variable.

    Two services must not share these ports: replicas bind with SO_REUSEPORT, so each would get the other's
    requests.
    """
    first, singles = _block_start(grpc_port), len(_SERVE_PORTS) + len(_AGENT_PORTS)
    replicas, half = first + singles, (_BLOCK_PORTS - singles) // 2
    ports = {name: first + number for number, name in enumerate(_SERVE_PORTS)}
    for number, protocol in enumerate(("HTTP", "GRPC")):
        ports[f"RAY_SERVE_DIRECT_INGRESS_MIN_{protocol}_PORT"] = replicas + number * half
        ports[f"RAY_SERVE_DIRECT_INGRESS_MAX_{protocol}_PORT"] = replicas + (number + 1) * half
    return {name: str(port) for name, port in ports.items()}


def agent_ports(grpc_port: int) -> dict[str, int]:
    """Return the ports of a Ray node's agents, by Ray's parameter."""
    first = _block_start(grpc_port) + len(_SERVE_PORTS)
    return {name: first + number for number, name in enumerate(_AGENT_PORTS)}


def _block_start(grpc_port: int) -> int:
    return _FIRST_BLOCK + _BLOCK_PORTS * (grpc_port % _BLOCKS)


def haproxy_hosts(door: DoorConfig) -> dict[int, str]:
    """Return the address at which each of HAProxy's ports listens. Without it Serve's fallback proxy would be
    public."""
    internal = serve_ports(door.grpc_port)
    hosts = {int(internal[name]): LOOPBACK for name in _SERVE_PORTS}
    return hosts | dict.fromkeys((door.grpc_port, door.http_port), door.host)


def check_ports(door: DoorConfig) -> None:
    """Check that no port is in use, except the replicas' ports. Raises ConfigError with the key.

    HAProxy listens with SO_REUSEPORT, so a second service would silently get half the requests.
    """
    for _, key, host, port in public_ports(door):
        _check_port(f"{key}: port {port}", host, port)
    internal = serve_ports(door.grpc_port)
    named = {name: int(internal[name]) for name in _SERVE_PORTS} | agent_ports(door.grpc_port)
    for name, port in named.items():
        _check_port(f"grpc_port: port {port}, {name} beside {door.grpc_port},", LOOPBACK, port)


def _check_port(description: str, host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"door.{description} cannot be used ({error.strerror}): "
                "stop what listens there, or configure another port"
            ) from None
