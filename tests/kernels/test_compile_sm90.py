"""Tests, without a GPU, that every kernel compiles for Hopper, fits shared memory and uses tensor cores.

Files in `compile_cases/` list the cases: (function, argument types, constants[, options]).
"""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deltafront

ROOT = Path(deltafront.__file__).parent
SHARED_LIMIT = 227 * 1024
CASES = sorted(Path(__file__).with_name("compile_cases").glob("*.py"))


def sources() -> list[Path]:
    """List the files that may have kernels. Benchmarks have kernels of methods that the service refuses."""
    return [path for folder in ("kernels", "benchmarks") for path in (ROOT / folder).rglob("*.py")]


def jitted(tree: ast.Module) -> set[str]:
    """Return the names of a module's functions that Triton or Gluon compiles."""
    decorators = ("triton.jit", "gluon.jit")
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith(decorators) for decorator in node.decorator_list)
    }


def launched(tree: ast.Module) -> set[str]:
    """Return a module's launched kernels: `name[grid](…)`, `module.name[grid](…)` or `Launcher(name)`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [ast.unparse(node.func.value) for node in calls if isinstance(node.func, ast.Subscript)]
    names += [ast.unparse(node.args[0]) for node in calls if ast.unparse(node.func) == "Launcher"]
    return {name.rpartition(".")[2] for name in names}


def compiled_cases(path: Path) -> set[str]:
    """Return the names of the functions in a file's COMPILE_CASES. Functions that they call need no case."""
    return {case[0].__name__ for case in runpy.run_path(str(path))["COMPILE_CASES"]}


def test_every_kernel_that_is_launched_has_compile_cases() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sources()}
    kernels = set().union(*map(jitted, trees.values()))
    taken = set().union(*map(launched, trees.values())) & kernels
    assert taken & jitted(trees[ROOT / "kernels" / "paged_decode" / "kernel.py"]), "it looks everywhere"
    assert taken == set().union(*map(compiled_cases, CASES))


def test_no_two_kernels_share_a_name() -> None:
    """`test_every_kernel_that_is_launched_has_compile_cases` identifies kernels by name."""
    named = [name for path in sources() for name in jitted(ast.parse(path.read_text()))]
    assert len(named) == len(set(named)), sorted(name for name in named if named.count(name) > 1)


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """Compile all files' cases in one process, which imports torch and Triton once."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_files", *map(str, CASES)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.mark.long
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_kernel_compiles_for_sm90(path: Path, records: list[dict[str, Any]]) -> None:
    of_file = [record for record in records if record["file"] == str(path)]
    assert of_file
    for record in of_file:
        assert "error" not in record, record["error"]
        assert record["shared"] <= SHARED_LIMIT, record
        assert record["wgmma"] or not record["needs_wgmma"], record
