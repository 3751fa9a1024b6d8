"""Every kernel compiles for Hopper, fits its shared memory and uses its matrix unit; needs no GPU.

A kernel's module lists what to compile in COMPILE_CASES: (function, argument types, constants[, options]).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import deltafront

ROOT = Path(deltafront.__file__).parent
SHARED_LIMIT = 227 * 1024


def modules() -> list[str]:
    found = [path for path in (ROOT / "kernels").rglob("*.py") if "\nCOMPILE_CASES = " in path.read_text()]
    return sorted(".".join(("deltafront", *path.relative_to(ROOT).with_suffix("").parts)) for path in found)


def test_every_jitted_function_that_is_launched_is_listed() -> None:
    """A file that launches kernels (`name[grid](…)`) must say how to compile them."""
    launching = {
        path
        for path in (ROOT / "kernels").rglob("*.py")
        if "_kernel[" in path.read_text() and "import triton" in path.read_text()
    }
    listed = {ROOT.parent / (name.replace(".", "/") + ".py") for name in modules()}
    named = {path.relative_to(ROOT).as_posix() for path in launching}
    known = {Path(path).as_posix().partition("deltafront/")[2] for path in listed}
    # launch.py only fills in the arguments of flash.py's kernel
    assert named - {"kernels/executors/launch.py"} <= known, sorted(named - known)


@pytest.mark.parametrize("module", modules())
def test_compiles_for_sm90(module: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_module.py")
    run = subprocess.run(
        [sys.executable, str(script), module], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    records = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert records
    for record in records:
        assert record["shared"] <= SHARED_LIMIT, record
        assert record["wgmma"] or not record["needs_wgmma"], record
