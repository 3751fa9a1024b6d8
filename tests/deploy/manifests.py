"""Helpers for the tests of manifests: the overlays as Kubernetes gets them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltafront.service.config import ServiceConfig, parse

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "one-gpu", "one-gpu-512k", "pd-8b", "pd-70b")
FETCHING = tuple(name for name in OVERLAYS if name != "cpu")
"""The overlays with the model on a volume. The image of `cpu` contains it."""
GROUPS = ("door", "prefill", "decode")

Object = dict[str, Any]


@functools.cache
def rendered(folder: str) -> tuple[Object, ...]:
    """Render all objects of a kustomization in deploy/kubernetes."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def ray_service(overlay: str) -> Object:
    (found,) = of_kind(rendered(f"overlays/{overlay}"), "RayService")
    spec: Object = found["spec"]
    return spec


def worker_groups(overlay: str) -> dict[str, Object]:
    groups = ray_service(overlay)["rayClusterConfig"]["workerGroupSpecs"]
    return {group["groupName"]: group for group in groups}


def templates(overlay: str) -> dict[str, Object]:
    """Return the pod templates of the head and of the worker groups."""
    head = ray_service(overlay)["rayClusterConfig"]["headGroupSpec"]["template"]
    return {"head": head} | {name: group["template"] for name, group in worker_groups(overlay).items()}


def container(template: Object) -> Object:
    """Return Ray's container, which for KubeRay is the first."""
    first: Object = template["spec"]["containers"][0]
    return first


def pod_templates(overlay: str) -> dict[str, Object]:
    """Return all pod templates: Ray's pods, the model's Job if there is one, and Redis."""
    objects = rendered(f"overlays/{overlay}")
    jobs = [("model", one) for one in of_kind(objects, "Job")]
    others = [("redis", one) for one in of_kind(objects, "StatefulSet")]
    return templates(overlay) | {name: one["spec"]["template"] for name, one in jobs + others}


def with_component(overlay: str, component: str, folder: Path) -> tuple[Object, ...]:
    """Render an overlay with a component of deploy/kubernetes, as a user would add it."""
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUBERNETES / "overlays" / overlay, folder.resolve())],
        "components": [os.path.relpath(KUBERNETES / component, folder.resolve())],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return rendered(str(folder.resolve()))


def serve_config(overlay: str) -> Object:
    """Return serveConfigV2 from the overlay's patch, without kubectl."""
    (operation,) = yaml.safe_load((KUBERNETES / "overlays" / overlay / "serve.yaml").read_text())
    content: Object = yaml.safe_load(operation["value"])
    return content


def settings(overlay: str) -> ServiceConfig:
    return parse(serve_config(overlay)["applications"][0]["args"], overlay)
