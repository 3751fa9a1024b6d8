"""constraints.txt resolves from PyPI alone on every platform that README names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # needs PyPI and some minutes

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES_OWN = (
    "PIP_CONSTRAINT",
    "PIP_EXTRA_INDEX_URL",
    "PIP_NO_INDEX",
    "UV_FIND_LINKS",
    "UV_EXTRA_INDEX_URL",
)
"""Variables with which a machine adds its own package sources."""


TRIES = 3


def run(*command: str | Path, **environment: str) -> None:
    """Run a command that must succeed. A tool that crashed has said nothing, and is asked again."""
    kept = {name: value for name, value in os.environ.items() if name not in MACHINES_OWN}
    for _ in range(TRIES):
        done = subprocess.run(
            command, cwd=ROOT, env={**kept, **environment}, check=False, capture_output=True, text=True
        )
        if done.returncode >= 0:  # a signal ends it with a negative one: uv 0.13.9 had SIGSEGV once
            break
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-3000:]}"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_constraints_resolve_for_every_platform(platform: str, python: str, tmp_path: Path) -> None:
    """Only wheels are used. macOS 14 is the oldest with wheels of torch."""
    uv = Path(sys.executable).parent / "uv"
    where = ["--python-platform", platform, "--python-version", python]
    what = ["-c", "constraints.txt", "--extra", "dev", "--extra", "otel", "pyproject.toml"]
    environment = {"UV_NO_CONFIG": "1", "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    run(uv, "pip", "compile", "-q", "--no-build", *where, *what, "-o", tmp_path / "pins.txt", **environment)
    wanted = set((ROOT / "constraints.txt").read_text().splitlines())
    assert "torch==2.13.0" in wanted & set((tmp_path / "pins.txt").read_text().splitlines())


def test_pip_can_install_makes_requirements_from_pypi() -> None:
    command = ["-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "-c", "constraints.txt"]
    run(sys.executable, *command, ".[dev]", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")
