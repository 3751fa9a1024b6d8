"""Generated and declared things are up to date: protobuf code and the package list."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_protobuf_code_is_what_the_contract_generates(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development dependency")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "deltafront/protos=protos"]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    subprocess.run([*command, "protos/v1/deltafront.proto"], cwd=ROOT, check=True)
    made = sorted((tmp_path / "deltafront" / "protos" / "v1").iterdir())
    kept = sorted(p.name for p in (ROOT / "protos" / "v1").glob("deltafront_pb2*"))
    assert [p.name for p in made] == kept
    for path in made:
        assert path.read_text() == (ROOT / "protos" / "v1" / path.name).read_text(), (
            f"{path.name}: run make proto"
        )


def test_every_package_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = ("kernels", "workers", "service", "protos", "benchmarks")
    found = {
        "deltafront." + ".".join(p.parent.relative_to(ROOT).parts)
        for folder in folders
        for p in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == found | {"deltafront"}
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} holds modules but no __init__.py"
