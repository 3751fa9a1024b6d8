"""What a configuration opens beyond the machine, as the start prints it."""

from __future__ import annotations

from typing import Any

import pytest

from deltafront.service.config import ConfigError, parse
from deltafront.service.local.exposure import exposed
from deltafront.service.local.local_ray import haproxy_hosts, inner_ports

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
def test_every_address_beyond_loopback_is_told(door: dict[str, Any], said: str) -> None:
    assert exposed(parse(content("door", **door)).door) == said


def test_only_clients_ports_leave_loopback() -> None:
    """Of HAProxy's: statistics and metrics stay."""
    door = parse(content("door", host="10.0.0.7")).door
    hosts = haproxy_hosts(door)
    assert {hosts.pop(door.grpc_port), hosts.pop(door.http_port)} == {"10.0.0.7"}
    assert set(hosts.values()) == {"127.0.0.1"}
    ports = inner_ports(door.grpc_port)
    for name in ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT"):
        assert int(ports[name]) in hosts


@pytest.mark.parametrize("key", ["host", "metrics_host"])
def test_a_host_is_an_address(key: str) -> None:
    with pytest.raises(ConfigError, match=f"door.{key} = 'everywhere': .*IPv4 or IPv6"):
        parse(content("door", **{key: "everywhere"}))
