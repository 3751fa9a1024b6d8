"""What Serve is told about how replicas come and go."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deltafront.service.app import _owner, assemble
from deltafront.service.config import parse
from deltafront.workers.decode import worker
from deltafront.workers.prefill.group import group
from deltafront.workers.settings import DecodeConfig, PrefillConfig


@pytest.mark.parametrize("surge", [False, True])
@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [("PrefillGroup", group, PrefillConfig), ("DecodeReplica", worker, DecodeConfig)],
)
def test_a_replacement_may_start_before_the_old_one_goes(
    name: str, module: ModuleType, kind: Any, surge: bool
) -> None:
    made = _owner(name, module, kind(surge=surge, drain_s=30), {})._deployment_config
    assert made.max_surge_percent == int(surge)
    assert made.graceful_shutdown_timeout_s == 50


@pytest.mark.parametrize(
    ("door", "surge", "seconds"), [({}, 1, 5.0), ({"per_node": 1}, 0, 5.0), ({"drain_s": 30}, 1, 35.0)]
)
def test_a_door_is_replaced_first_unless_its_node_takes_one_only(
    door: dict[str, Any], surge: int, seconds: float
) -> None:
    content = {"model": {"path": "m"}, "decode": {"page_selection": "full"}, "door": door}
    made = assemble(parse(content), Path("/nowhere"))._bound_deployment._deployment_config
    assert made.max_ongoing_requests > parse(content).door.max_requests, "the door refuses, Serve lets wait"
    assert (made.max_surge_percent, made.graceful_shutdown_timeout_s) == (surge, seconds)
