"""Who may import whom (docs/architecture.md), read from the source, and that the door never loads torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "workers", "service", "protos")
SOURCES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py") if "_pb2" not in p.name)

# service takes the messages, the torch-free planners beside them, and the actor shells.
SERVICE_MAY_TAKE = {
    "workers.messages",
    "workers.settings",
    "workers.roles",
    "workers.remote",
    "workers.model.config",
    "workers.model.store",
    "workers.model.calibration",
    "workers.prefill.group",
    "workers.decode.worker",
    "workers.kv.page_pool",
}
RAY_IN_WORKERS = {
    "workers/remote.py",
    "workers/prefill/group.py",
    "workers/kv/transports.py",
    "workers/decode/worker.py",
}
RAY_IN_SERVICE = {"service/app.py", "service/fleet/dispatch.py", "service/client/local_ray.py"}
PROTOBUF_IN_SERVICE = {
    "service/door/grpc_door.py",
    "service/door/validate.py",
    "service/door/wire.py",
    "service/client/client.py",
    "service/client/results.py",
}


def imports(path: Path) -> Iterator[str]:
    """Every import as a dotted name; relative ones resolved from the root of the package."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" if module else alias.name for alias in node.names)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_layers(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    wrong, may_take = [], SERVICE_MAY_TAKE
    for name in imports(path):
        target = name.split(".")[0]
        if name.startswith("deltafront") and "protos" not in name:
            wrong.append(f"{name}: imports inside the package are relative")
        if folder == "kernels" and target in ("workers", "service", "protos", "ray", "transformers", "grpc"):
            wrong.append(name)
        if folder == "workers" and target in ("service", "protos", "grpc", "prometheus_client"):
            wrong.append(name)
        if folder == "service" and (
            target == "kernels"
            or (target == "workers" and not any(name == m or name.startswith(m + ".") for m in may_take))
        ):
            wrong.append(name)
    assert not wrong, wrong


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_ray_protobuf_and_metrics_stay_in_their_files(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    names = {name.split(".")[0] for name in imports(path)}
    generated = ("deltafront.protos", "protos", "google.protobuf")
    protobuf = any(name.startswith(generated) for name in imports(path))
    if folder in ("workers", "service"):
        allowed = RAY_IN_WORKERS if folder == "workers" else RAY_IN_SERVICE
        assert "ray" not in names or name_of(path) in allowed, "Ray belongs in the shells"
    if folder == "service":
        assert not protobuf or name_of(path) in PROTOBUF_IN_SERVICE, "protobuf belongs in door and client"
        assert "prometheus_client" not in names or path.name == "metrics.py", "metrics.py declares metrics"


def test_kernels_init_is_free_of_imports() -> None:
    assert not list(imports(ROOT / "kernels" / "__init__.py"))


TORCH_FREE = [
    "service.app",
    "service.door.grpc_door",
    "service.client.client",
    "service.client.calibrate",
    "workers.messages",
    "workers.roles",
    "workers.remote",
    "workers.prefill.group",
    "workers.decode.worker",
    "workers.prefill.schedule",
]


@pytest.mark.parametrize("module", [*TORCH_FREE, "workers.model.config", "workers.kv.page_pool"])
def test_importing_leaves_torch_out(module: str) -> None:
    code = f"import sys, deltafront.{module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"torch or transformers was imported {done.stderr}"
