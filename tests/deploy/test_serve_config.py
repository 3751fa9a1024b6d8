"""serveConfigV2 is made from the overlay's configuration, and Serve knows all of its keys."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.serve.schema import (
    HTTPOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
    gRPCOptionsSchema,
)

from deltafront.service.app import build
from deltafront.service.config import ConfigError, ServiceConfig, parse

from .manifests import KUBERNETES, OVERLAYS, Object, ray_service, serve_config, settings


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("manifests_build", KUBERNETES / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unknown(content: Any, model: type[BaseModel]) -> Iterator[str]:
    known = {name for key, field in model.model_fields.items() for name in (key, field.alias)}
    yield from (f"{model.__name__} has no {key}" for key in content.keys() - known)


def problems(content: Object) -> list[str]:
    """Find keys that Serve would silently ignore, because ServeDeploySchema accepts any key."""
    found = list(unknown(content, ServeDeploySchema))
    found += unknown(content.get("http_options", {}), HTTPOptionsSchema)
    found += unknown(content.get("grpc_options", {}), gRPCOptionsSchema)
    for application in content["applications"]:
        found += unknown(application, ServeApplicationSchema)
    return found


def test_committed_serve_patches_match_the_overlays_configurations() -> None:
    build_module = generator()
    assert [path.name for path in build_module.overlays()] == sorted(OVERLAYS)
    for overlay in build_module.overlays():
        assert (overlay / "serve.yaml").read_text() == build_module.patch(overlay), "run make manifests"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_worker_groups_have_the_configured_node_labels(overlay: str) -> None:
    """Ray's autoscaler needs them for pods that do not exist yet."""
    generator().check_labels(ray_service(overlay)["rayClusterConfig"], settings(overlay), overlay)
    for group in ray_service(overlay)["rayClusterConfig"]["workerGroupSpecs"]:
        known = autoscaling_config._get_labels_from_group_spec(group)
        assert known == {"ray.io/node-group": group["groupName"]}


def test_manifests_refuse_a_worker_group_without_its_labels() -> None:
    cluster = copy.deepcopy(ray_service("pd-8b")["rayClusterConfig"])
    del cluster["workerGroupSpecs"][2]["labels"]
    with pytest.raises(ConfigError, match=r"worker group decode: add labels: {ray.io/node-group: decode}"):
        generator().check_labels(cluster, settings("pd-8b"), "pd-8b")
    del cluster["workerGroupSpecs"][2]
    with pytest.raises(ConfigError, match=r"decode.node_labels: no worker group has"):
        generator().check_labels(cluster, settings("pd-8b"), "pd-8b")


def test_manifests_refuse_a_model_that_pods_would_have_to_fetch(tmp_path: Path) -> None:
    content = yaml.safe_load((KUBERNETES / "overlays" / "cpu" / "config.yaml").read_text())
    content["model"]["path"] = "owner/name"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"model.path = 'owner/name': pods reach no hub: name a directory"):
        generator().patch(tmp_path)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_bounds_answers_without_max_tokens(overlay: str) -> None:
    given = yaml.safe_load((KUBERNETES / "overlays" / overlay / "config.yaml").read_text())["door"]
    assert given["default_max_tokens"] <= (64 if overlay == "cpu" else 1024)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_serve_configuration_is_patched_into_the_ray_service(overlay: str) -> None:
    assert yaml.safe_load(ray_service(overlay)["serveConfigV2"]) == serve_config(overlay)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_rendered_key_is_in_the_schema(overlay: str) -> None:
    content = serve_config(overlay)
    assert not problems(content)
    schema = ServeDeploySchema.model_validate(content)
    (application,) = schema.applications
    module, _, name = application.import_path.partition(":")
    assert getattr(importlib.import_module(module), name) is build
    (first,) = inspect.signature(build).parameters.values()
    assert first.kind is first.POSITIONAL_OR_KEYWORD
    for servicer in schema.grpc_options.grpc_servicer_functions:
        module, _, name = servicer.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
    assert isinstance(parse(application.args), ServiceConfig)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ((), "grpc_option"),
        (("grpc_options",), "grpc_servicer_function"),
        (("http_options",), "prot"),
        (("applications", 0), "arg"),
    ],
)
def test_finds_a_misspelt_key_in_ray_serves_configuration(path: tuple[Any, ...], key: str) -> None:
    content = copy.deepcopy(serve_config("cpu"))
    inner: Any = content
    for step in path:
        inner = inner[step]
    inner[key] = 1
    (problem,) = problems(content)
    assert key in problem


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("prefill", "stagez", 2, "unknown key 'prefill.stagez'"),
        ("prefill", "node_labels", {"a b": "c"}, "prefill.node_labels"),
        ("decode", "node_labels", {"group": "no spaces"}, "decode.node_labels"),
        ("door", "per_node", 0, "door.per_node"),
    ],
)
def test_error_names_a_bad_value_in_an_overlays_configuration(
    section: str, key: str, value: Any, named: str
) -> None:
    content = yaml.safe_load((KUBERNETES / "overlays" / "cpu" / "config.yaml").read_text())
    content[section][key] = value
    with pytest.raises(ConfigError, match=named):
        parse(content)
