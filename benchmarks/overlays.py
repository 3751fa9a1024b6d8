"""Reads the resource requests of the overlays in deploy/kubernetes, for the tables of docs/deploy.md.

It needs no Kustomize: the overlays patch the RayService with JSON 6902 patches, and a test compares the
result with that of `kubectl kustomize`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deltafront.service.cli.size import GIB, SHAPES, rank_bytes, stage_bytes
from deltafront.service.config import ServiceConfig, load

KUBERNETES = Path(__file__).resolve().parent.parent / "deploy" / "kubernetes"
_MEMORY = "nvidia.com/gpu.memory"
"""The node label with the MiB of a GPU. Overlays require more than a given number."""
_SUFFIXES = (("m", 1e-3), ("Mi", 1 << 20), ("Gi", 1 << 30))


@dataclass(frozen=True)
class Overlay:
    """An overlay's config.yaml and its patched rayClusterConfig."""

    name: str
    config: ServiceConfig
    cluster: Mapping[str, Any]

    @property
    def gpus(self) -> dict[float, float]:
        """The number of GPUs that all pods request, by GiB of a GPU.

        Raises:
            ValueError: Pods request GPUs but do not say how much memory a GPU needs.
        """
        found: dict[float, float] = {}
        for name, group in self.worker_groups.items():
            if count := group["replicas"] * _requested(group, "nvidia.com/gpu"):
                gib = self._gpu_gib(name)
                found[gib] = found.get(gib, 0.0) + count
        return found

    def _gpu_gib(self, group_name: str) -> float:
        affinity = self.worker_groups[group_name]["template"]["spec"]["affinity"].get("nodeAffinity", {})
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
        for term in required.get("nodeSelectorTerms", ()):
            for asked in term["matchExpressions"]:
                if asked["key"] == _MEMORY:
                    return int(asked["values"][0]) / 1024
        raise ValueError(f"overlay {self.name}: the pods of {group_name} ask for no {_MEMORY}")

    @property
    def worker_groups(self) -> dict[str, Any]:
        return {group["groupName"]: group for group in self.cluster["workerGroupSpecs"]}

    def requested(self, resource: str) -> float:
        """Return what all pods together request of `cpu`, `memory` (bytes) or `nvidia.com/gpu`."""
        pods = [(self.cluster["headGroupSpec"], 1)]
        pods += [(group, group["replicas"]) for group in self.worker_groups.values()]
        return sum(count * _requested(group, resource) for group, count in pods)


def _requested(group: Mapping[str, Any], resource: str) -> float:
    (container, *_) = group["template"]["spec"]["containers"]
    return quantity(container["resources"]["requests"].get(resource, 0))


def quantity(value: str | int) -> float:
    """Parse a Kubernetes quantity, such as "500m" or "4Gi"."""
    text = str(value)
    for suffix, factor in _SUFFIXES:
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)


def names() -> list[str]:
    """Return the overlays' names, sorted by number of GPUs."""
    found = (path.parent.name for path in KUBERNETES.glob("overlays/*/config.yaml"))
    return sorted(found, key=lambda name: (read(name).requested("nvidia.com/gpu"), name))


def read(name: str) -> Overlay:
    """Read an overlay. Raises ConfigError for an invalid configuration, ValueError for an invalid patch."""
    folder = KUBERNETES / "overlays" / name
    return Overlay(name, load(folder / "config.yaml"), _service(folder)["spec"]["rayClusterConfig"])


def _service(folder: Path) -> Any:
    """Return the RayService, patched by an overlay and by the overlays that it builds on."""
    content = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    (below,) = [folder / one for one in content["resources"]]
    if (below / "rayservice.yaml").exists():
        base = yaml.safe_load((below / "rayservice.yaml").read_text(encoding="utf-8"))
        service = json.loads(json.dumps(base))  # copies objects that YAML anchors share
    else:
        service = _service(below)
    for patch in content["patches"]:
        if patch["target"]["kind"] == "RayService" and "patch" in patch:
            patched(service, yaml.safe_load(patch["patch"]))
    return service


def patched(document: Any, operations: Iterable[Mapping[str, Any]]) -> None:
    """Apply JSON 6902 operations in place. Raises ValueError if one is unsupported or a `test` fails."""
    for operation in operations:
        *parents, last = operation["path"].removeprefix("/").split("/")
        place = document
        for key in parents:
            place = place[_index(place, key)]
        index = _index(place, last)
        match operation["op"]:
            case "test" if place[index] == operation["value"]:
                pass
            case "add" if isinstance(place, dict):
                place[index] = operation["value"]
            case "replace" if not isinstance(place, dict) or index in place:
                place[index] = operation["value"]
            case "remove":
                del place[index]
            case _:
                raise ValueError(f"{operation['op']} {operation['path']} does not fit")


def _index(place: Any, key: str) -> Any:
    return int(key) if isinstance(place, list) else key.replace("~1", "/").replace("~0", "~")


HEADER = ("overlay", "model", "GPUs", "prefill", "decode", "holds", "CPUs, memory")


def rows() -> list[list[str]]:
    """Return one row for each overlay, with the columns of HEADER."""
    return [row(read(name)) for name in names()]


def row(overlay: Overlay) -> list[str]:
    """Return an overlay's row. GiB counts weights and KV cache, of the fullest stage and of a decode rank."""
    prefill, decode, model = overlay.config.prefill, overlay.config.decode, overlay.config.model
    how = model.dtype, model.quantisation, decode.kv_dtype
    stages, workers = str(prefill.groups * prefill.stages), str(decode.workers)
    ranks = decode.tensor_parallel
    if ranks > 1:
        workers = f"{workers} × {ranks}"
    shape = next((shape for name, shape in SHAPES.items() if name in model.path), None)
    if shape is not None:
        stage = stage_bytes(shape, prefill.stages, prefill.cache_tokens, *how)
        rank = rank_bytes(shape, ranks, decode.cache_tokens, *how)
        stages, workers = f"{stages} × {stage / GIB:.1f} GiB", f"{workers} × {rank / GIB:.1f} GiB"
        if overlay.config.handoff.transport == "mapped":
            stages = "1, maps decode's"
    return [
        f"`{overlay.name}`",
        overlay.config.door.display_name,
        ", ".join(f"{count:g} × {gib:.0f} GiB" for gib, count in overlay.gpus.items()) or "none",
        stages,
        workers,
        f"{decode.workers * decode.cache_tokens:,} tokens",
        f"{overlay.requested('cpu'):g}, {overlay.requested('memory') / GIB:,.0f} GiB",
    ]
