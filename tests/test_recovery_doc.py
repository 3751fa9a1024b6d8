"""The periods and back-offs that docs/recovery.md states are those of the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from ray._raylet import Config
from ray.serve._private import constants as serve_constants

from deltafront.service import app
from deltafront.service.config import ServiceConfig, parse

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "recovery.md").read_text(encoding="utf-8")
DEFAULTS = parse({"model": {"path": "m"}, "decode": {"page_selection": "full"}})


ROWS = re.findall(r"^\| .* \| ([0-9.]+) \| `([a-z_A-Z.]+)` \|$", TEXT, flags=re.MULTILINE)
STATED = {name: float(number) for number, name in ROWS}
UNITS = {"ms": 0.001, "s": 1.0}


def value(name: str) -> float:
    section, _, key = name.rpartition(".")
    if section == "ray.node":
        return float(getattr(Config, key)()) * UNITS["ms"]
    if section.startswith("ray."):
        found = getattr(importlib.import_module(section), key)
        number, unit = re.fullmatch(r"([\d.]+)(m?s)?", str(found)).groups()  # type: ignore[union-attr]
        return float(number) * UNITS[unit or "s"]
    if section in ServiceConfig.model_fields:
        return float(getattr(getattr(DEFAULTS, section), key))
    return float(getattr(importlib.import_module(f"deltafront.{section}"), key))


def test_what_the_page_says_is_what_the_code_does() -> None:
    assert len(ROWS) == TEXT.count("\n| ") - TEXT.count("\n| after |"), "every row has a number and a name"
    assert {name: value(name) for name in STATED} == STATED


def test_how_often_in_a_row_is_what_the_page_says() -> None:
    assert serve_constants.REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD == 3
    assert serve_constants.PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD == 3
    assert serve_constants.RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL == 2
    assert serve_constants.RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT == 3
    assert serve_constants.RAY_SERVE_HAPROXY_HEALTH_CHECK_DOWNINTER == "250ms"
    assert Config.health_check_failure_threshold() == 5


@pytest.mark.parametrize(
    ("deployment", "patience"),
    [("FrontDoor", "DOOR"), ("PrefillGroup", "OWNER"), ("DecodeReplica", "OWNER")],
)
def test_serve_is_told_the_periods_that_the_page_states(deployment: str, patience: str) -> None:
    """Of every deployment, as the application hands it over."""
    door = app.application(DEFAULTS, Path("/nowhere"))._bound_deployment
    owners = [one._bound_deployment for one in door.init_args[2:]]
    given = {one.name: one._deployment_config for one in (door, *owners)}
    assert set(given) == {"FrontDoor", "PrefillGroup", "DecodeReplica"}
    told = given[deployment]
    assert told.health_check_period_s == STATED["service.app._HEALTH_PERIOD_S"]
    assert told.health_check_timeout_s == STATED[f"service.app._{patience}_TIMEOUT_S"]
