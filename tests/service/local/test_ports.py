"""The ports of a service: public ports, ports that must be free, and ports that are chosen by the gRPC
port."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from deltafront.service.config import ConfigError, parse
from deltafront.service.local.ports import (
    agent_ports,
    check_ports,
    describe_exposure,
    haproxy_hosts,
    serve_ports,
)

from ..test_config import content


@pytest.mark.parametrize(
    ("door", "said"),
    [
        ({}, "to this machine alone"),
        ({"host": "127.0.0.1", "metrics_host": "::1"}, "to this machine alone"),
        (
            {"host": "0.0.0.0"},
            "beyond this machine: gRPC 0.0.0.0:9000, OpenAI 0.0.0.0:8000, metrics 0.0.0.0:9464; "
            "anybody may call",
        ),
        (
            {"host": "::", "metrics_host": "127.0.0.1", "tokens_file": "/tokens"},
            "beyond this machine: gRPC [::]:9000, OpenAI [::]:8000; requests need a token",
        ),
        ({"metrics_host": "10.0.0.7"}, "beyond this machine: metrics 10.0.0.7:9464; anybody may call"),
        (
            {"host": "10.0.0.7", "metrics_host": "127.0.0.1", "tls_certificate": "/c", "tls_key": "/k"},
            "beyond this machine: gRPC 10.0.0.7:9000, OpenAI 10.0.0.7:8000, gRPC with TLS 10.0.0.7:9443; "
            "anybody may call",
        ),
    ],
)
def test_names_every_address_beyond_loopback(door: dict[str, Any], said: str) -> None:
    assert describe_exposure(parse(content("door", **door)).door) == said


def test_only_client_ports_listen_beyond_loopback() -> None:
    """HAProxy's statistics and metrics ports stay on loopback."""
    door = parse(content("door", host="10.0.0.7")).door
    hosts = haproxy_hosts(door)
    assert {hosts.pop(door.grpc_port), hosts.pop(door.http_port)} == {"10.0.0.7"}
    assert set(hosts.values()) == {"127.0.0.1"}
    ports = serve_ports(door.grpc_port)
    for name in ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT"):
        assert int(ports[name]) in hosts


@pytest.mark.parametrize("key", ["host", "metrics_host"])
def test_refuses_a_host_that_is_not_an_ip_address(key: str) -> None:
    with pytest.raises(ConfigError, match=f"door.{key} = 'everywhere': .*IPv4 or IPv6"):
        parse(content("door", **{key: "everywhere"}))


@pytest.mark.parametrize("reuse", [False, True])
def test_names_a_port_that_is_taken(reuse: bool) -> None:
    with socket.socket() as taken:
        if reuse:  # like HAProxy
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"door.http_port: port {port} cannot be used"):
            check_ports(parse(content("door", http_port=port, grpc_port=1025, metrics_port=1026)).door)


def test_services_on_neighbouring_ports_share_no_port() -> None:
    """Like Serve, this reads the upper bounds of ranges as exclusive."""
    taken: set[int] = set()
    for grpc_port in range(9000, 9120):
        ports = {name: int(port) for name, port in serve_ports(grpc_port).items()}
        own = {port for name, port in ports.items() if "DIRECT_INGRESS" not in name}
        own |= set(agent_ports(grpc_port).values())
        for kind in ("HTTP", "GRPC"):
            least, end = (ports[f"RAY_SERVE_DIRECT_INGRESS_{bound}_{kind}_PORT"] for bound in ("MIN", "MAX"))
            assert end - least >= 45
            own |= set(range(least, end))
        assert len(own) == 100 and not own & taken
        taken |= own
    assert (min(taken), max(taken)) == (20_000, 31_999), "neither Ray's workers' ports nor those of clients"


@pytest.mark.parametrize(
    "port", [int(serve_ports(1025)["RAY_SERVE_HAPROXY_STATS_PORT"]), agent_ports(1025)["metrics_agent_port"]]
)
def test_error_names_a_taken_port_that_has_no_configuration_key(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"door.grpc_port: port {port}, .* beside 1025, cannot"):
            check_ports(parse(content("door", http_port=1027, grpc_port=1025, metrics_port=1026)).door)
