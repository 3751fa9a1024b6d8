"""Periods of Ray's and Serve's health checks, on which recovery relies: ours are set, theirs are as
documented."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.serve._private import constants as serve_constants
from ray.serve._private.haproxy import HAProxyApi

from deltafront.service import app
from deltafront.service.config import parse

DEFAULTS = parse({"model": {"path": "m"}, "decode": {"page_selection": "full"}})


def test_ray_and_serve_thresholds_are_the_documented_ones() -> None:
    assert serve_constants.REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD == 3
    assert serve_constants.PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD == 3
    assert serve_constants.RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL == 2
    assert serve_constants.RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT == 3
    assert serve_constants.RAY_SERVE_HAPROXY_HEALTH_CHECK_DOWNINTER == "250ms"
    assert Config.health_check_failure_threshold() == 5


def test_serve_waits_5_s_for_an_answer_of_haproxy() -> None:
    """Serve has no setting for this, so docs/operations.md names the place in its code."""
    assert inspect.getsource(HAProxyApi._send_socket_command).count("timeout=5.0") == 2


@pytest.mark.parametrize(
    ("deployment", "timeout_s"),
    [
        ("FrontDoor", app._DOOR_TIMEOUT_S),
        ("PrefillGroup", app._OWNER_TIMEOUT_S),
        ("DecodeReplica", app._OWNER_TIMEOUT_S),
    ],
)
def test_serve_gets_the_configured_health_periods(deployment: str, timeout_s: float) -> None:
    door = app.application(DEFAULTS, Path("/nowhere"))._bound_deployment
    owners = [owner._bound_deployment for owner in door.init_args[2:]]
    configs = {bound.name: bound._deployment_config for bound in (door, *owners)}
    assert set(configs) == {"FrontDoor", "PrefillGroup", "DecodeReplica"}
    assert configs[deployment].health_check_period_s == app._HEALTH_PERIOD_S
    assert configs[deployment].health_check_timeout_s == timeout_s
