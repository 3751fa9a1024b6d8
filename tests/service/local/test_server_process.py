"""A service as a child process: its address, its start and its end."""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import signal
import string
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from deltafront.benchmarks.engine.model import SHAPES, write_model
from deltafront.benchmarks.engine.setup import Setup
from deltafront.service.config import ConfigError
from deltafront.service.local import server_process
from deltafront.service.local.server_process import LocalService
from deltafront.workers import waits

from ..inprocess import wait_until


def written(folder: Path, door: str) -> Path:
    path = folder / "service.yaml"
    path.write_text(f"model: {{path: m}}\ndecode: {{page_selection: full}}\ndoor: {{{door}}}\n")
    return path


def test_local_service_takes_its_address_from_the_configuration(tmp_path: Path) -> None:
    assert LocalService(written(tmp_path, "")).address == "127.0.0.1:9000"
    assert LocalService(str(written(tmp_path, "grpc_port: 9123"))).address == "127.0.0.1:9123"


def test_names_a_configuration_mistake_before_starting_anything(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'grpc_port'"):
        LocalService(written(tmp_path, "grcp_port: 9123"))


def shortest_folder() -> Path:
    """Use a short temporary folder: the paths of HAProxy's sockets leave seven characters for its name."""
    for letters in itertools.product(string.ascii_lowercase, repeat=2):
        with contextlib.suppress(FileExistsError):
            folder = Path("/tmp", "".join(letters))
            folder.mkdir(mode=0o700)
            return folder
    raise AssertionError("/tmp is full of such folders")


@pytest.mark.long
def test_service_can_restart_right_after_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's agents must free their ports first."""
    temporary = shortest_folder()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    write_model(tmp_path / "model", SHAPES["tiny"], torch.device("cpu"))
    ports = {"door.grpc_port": 9077, "door.http_port": 8077, "door.metrics_port": 9577}
    setup = Setup(tmp_path / "model", SHAPES["tiny"], 1024, chunk_tokens=512, device="cpu", more=ports)
    path = setup.write(tmp_path)
    for _ in range(2):
        with LocalService(path, start_s=500) as service:
            process = service._process
        assert process is not None and process.returncode == 0, service.log_tail()
    assert not [*temporary.iterdir()]
    temporary.rmdir()


def commanded(folder: Path, code: str) -> LocalService:
    """Make a service whose process runs `code` and then waits for signals."""
    service = LocalService(written(folder, "grpc_port: 9123"))
    code = f"import os, signal, sys; {code}; os.write(1, b'up\\n'); signal.pause()"
    service._command = [sys.executable, "-c", code]
    return service


def test_removes_its_folder_only_after_a_clean_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalService, "_wait_until_healthy", lambda _service: None)

    def folder(*, ending: int, trouble: bool = False) -> Path:
        service = commanded(tmp_path, f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({ending}))")
        with contextlib.suppress(ZeroDivisionError), service:
            wait_until(lambda: service.log_tail() == "up", "it does not start")
            assert not trouble or 1 / 0
        return service.log.parent

    assert not folder(ending=0).exists()
    for kept in (folder(ending=3), folder(ending=0, trouble=True)):
        assert (kept / "serve.log").read_text() == "up\n"
        shutil.rmtree(kept)


def test_stop_reports_a_timeout_before_it_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(LocalService, "_wait_until_healthy", lambda _service: None)
    monkeypatch.setattr(waits, "SLOW_S", 0.01)
    monkeypatch.setattr(server_process, "_STOP_S", 1.0)
    with commanded(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)") as service:
        wait_until(lambda: service.log_tail() == "up", "it does not start")
        pid = service.pid
        assert service.stop() == -signal.SIGKILL
    first, *_, last = caplog.messages
    assert first == f"after 0.01 s, waits for the service to stop (process {pid}); its log is {service.log}"
    assert any("has not stopped in 1 s, and is killed" in line for line in caplog.messages), last
    shutil.rmtree(service.log.parent)
