"""Environments of their own for other people's programs, from PyPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[1] / "build"
_PROBE = "httpx==0.28.1"


def python_with(requirements: Path, name: str) -> Path:
    """Return the Python of an environment in `build`, which is made once for these versions. Skips the test
    if PyPI cannot be reached."""
    folder = BUILD / name
    python, made = folder / "bin" / "python", folder / "requirements.txt"
    if not made.exists() or made.read_text() != requirements.read_text():
        uv = Path(sys.executable).parent / "uv"  # installs in a fifth of pip's time
        install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", python]
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        probe = subprocess.run([*install, _PROBE], capture_output=True, text=True, check=False)
        if probe.returncode:
            pytest.skip(f"PyPI cannot be reached: {probe.stderr.strip().splitlines()[-1]}")
        subprocess.run([*install, "-r", requirements], check=True)
        made.write_text(requirements.read_text())
    return python
