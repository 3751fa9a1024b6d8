"""Serve's settings for starting and stopping replicas, and errors of building the application."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from deltafront.service.app import _owner, assemble, build
from deltafront.service.config import parse
from deltafront.service.fleet.fleet import Fleet
from deltafront.service.metrics import Metrics
from deltafront.service.wiring import request_handler, shared_model
from deltafront.workers.decode import worker
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.prefill.group import group
from deltafront.workers.settings import DecodeConfig, PrefillConfig

from ..workers.model.directory.test_store import write_model
from .directory import LocalDirectory


@pytest.mark.parametrize("surge", [False, True])
@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [("PrefillGroup", group, PrefillConfig), ("DecodeReplica", worker, DecodeConfig)],
)
def test_new_replica_may_start_before_the_old_one_ends(
    name: str, module: ModuleType, kind: Any, surge: bool
) -> None:
    made = _owner(name, module, kind(surge=surge, drain_s=30), {})._deployment_config
    assert made.max_surge_percent == int(surge)
    assert made.graceful_shutdown_timeout_s == 50


@pytest.mark.parametrize(
    ("door", "surge", "seconds"), [({}, 1, 5.0), ({"per_node": 1}, 0, 5.0), ({"drain_s": 30}, 1, 35.0)]
)
def test_new_door_starts_first_if_its_node_has_room(door: dict[str, Any], surge: int, seconds: float) -> None:
    content = {"model": {"path": "m"}, "decode": {"page_selection": "full"}, "door": door}
    made = assemble(parse(content), Path("/nowhere"))._bound_deployment._deployment_config
    assert made.max_ongoing_requests > parse(content).door.max_requests, "the door refuses, Serve lets wait"
    assert (made.max_surge_percent, made.graceful_shutdown_timeout_s) == (surge, seconds)


def test_each_node_finds_the_model_that_the_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application is built on one node. Other nodes do not have its files, or have other files at the
    same path."""
    path = tmp_path / "model.gguf"
    write_model(path)
    content = {"model": {"path": str(path)}, "decode": {"page_selection": "full"}}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "head"))
    settings = shared_model(parse(content))
    shutil.rmtree(tmp_path / "head")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    sent = parse(settings.model_dump(mode="json"))
    assert sent.model.path == str(path) and sent.door.model_name == "model.gguf"
    assert load_model(sent.model, "cpu").config.layers == 2
    metrics = Metrics(tmp_path / "metrics", "m")
    fleet = Fleet(LocalDirectory([], []), lambda _view: None, refresh_s=1.0, renew_s=1.0)
    assert request_handler(sent, fleet, metrics, metrics_address="").positions == 256
    write_model(path, seed=1)
    with pytest.raises(ModelError, match="this node's files have the digest"):
        load_model(sent.model, "cpu")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"path": "/nowhere"}, "ModelError: no model '/nowhere'"),
        ({"path": "x", "pathh": "x"}, "ConfigError: .*'model.pathh'"),
    ],
)
def test_an_application_that_cannot_be_built_says_why_in_one_line(model: dict[str, Any], says: str) -> None:
    """Serve shows only the text of this exception, but the whole traceback of any other."""
    with pytest.raises(RayServeException, match=says) as raised:
        build({"model": model, "decode": {"page_selection": "full"}})
    assert "\n" not in str(raised.value)
