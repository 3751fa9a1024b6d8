"""The terminal shows why a service is delayed: Ray's kills for lack of memory, and workers that die
repeatedly."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltafront.service.config import ConfigError
from deltafront.service.local import cleanup, local_ray, troubles
from deltafront.service.local.troubles import Troubles

from ..inprocess import wait_until

KILLED = (
    "(raylet) 7 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other "
    "reasons at node (ID: 12, IP: 127.0.0.1) over the last time period.\n"
)


def status_of(message: str, status: str = "UPDATING") -> Any:
    deployment = SimpleNamespace(status=status, message=message)
    application = SimpleNamespace(deployments={"DecodeReplica": deployment})
    return SimpleNamespace(applications={"deltafront": application})


def watching(log: Path, status: Any, said: list[str]) -> Troubles:
    return Troubles(log, status, "deltafront", said.append)


def test_prints_each_line_of_workers_killed_for_memory_once(tmp_path: Path) -> None:
    log, said = tmp_path / "serve.log", list[str]()
    watch = watching(log, lambda: status_of(""), said)
    watch.look_at_log()
    log.write_text("before\n" + KILLED + KILLED[:40])
    watch.look_at_log()
    watch.look_at_log()
    assert len(said) == 1 and said[0].startswith("memory is short: Ray has killed 7 workers")
    with log.open("a") as file:
        file.write(KILLED[40:])
    watch.look_at_log()
    assert len(said) == 2


def test_prints_a_worker_death_again_only_if_its_reason_changes(tmp_path: Path) -> None:
    said: list[str] = []
    message = "A replica failed to start.\nTraceback\nOSError: no room"
    watch = watching(tmp_path / "none", lambda: status_of(message), said)
    for _ in range(3):
        watch.look_at_workers()
    assert said == ["DecodeReplica starts again: OSError: no room"]
    message = "Traceback\nOSError: no disk"
    watch.look_at_workers()
    assert said[1:] == ["DecodeReplica starts again: OSError: no disk"]


def test_healthy_service_and_lost_ray_print_no_trouble(tmp_path: Path) -> None:
    def gone() -> Any:
        raise ConnectionError("no control store")

    said: list[str] = []
    for status in (gone, lambda: status_of("an old Error", "HEALTHY"), lambda: status_of("")):
        watching(tmp_path / "none", status, said).look_at_workers()
    assert not said


def test_says_that_memory_is_short_while_serve_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(troubles, "_PERIOD_S", 0.01)
    asked, said = threading.Event(), list[str]()

    def never() -> Any:
        asked.set()
        threading.Event().wait()

    (tmp_path / "log").touch()
    with watching(tmp_path / "log", never, said):
        assert asked.wait(60)
        (tmp_path / "log").write_text(KILLED)
        wait_until(lambda: bool(said), "the status is waited for")


def test_names_too_little_memory_for_the_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import utils

    monkeypatch.setattr(utils, "estimate_available_memory", lambda: 1 << 30)
    with pytest.raises(ConfigError, match=r"^memory: 1\.0 GiB of .* are free, but the object store alone"):
        local_ray._check_memory()
    monkeypatch.setattr(utils, "estimate_available_memory", lambda: 8 << 30)
    local_ray._check_memory()


OWNER = """
import os, sys, tempfile
from deltafront.service.local import cleanup
tempfile.tempdir = sys.argv[1]
with cleanup.service_folder(2, "deltafront: the service has ended; LOG says more") as folder:
    if sys.argv[2] == "said":
        cleanup.said(folder)
    if sys.argv[2] != "well":
        os._exit(1)
"""


@pytest.mark.parametrize(("end", "line"), [("silent", True), ("said", False), ("well", False)])
def test_process_killed_by_ray_prints_the_reason(end: str, line: bool, tmp_path: Path) -> None:
    """Ray's driver exits without a message when its node is lost."""
    command = [sys.executable, "-c", OWNER, str(tmp_path), end]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ("deltafront: the service has ended; LOG says more\n" if line else "")
    wait_until(lambda: not list(tmp_path.iterdir()), "its folder is left")


IMPORTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(100)\n"


@pytest.mark.parametrize("module", ["deltafront.service.entry", "deploy/demo/demo.py"])
def test_ctrl_c_while_modules_are_loaded_has_no_traceback(module: str, tmp_path: Path) -> None:
    """Ctrl-C arrives while typer or rich is imported."""
    for name in ("typer", "rich"):
        (tmp_path / f"{name}.py").write_text(IMPORTED)
    root = Path(cleanup.__file__).resolve().parents[2]
    start = [str(root / module)] if module.endswith(".py") else ["-m", module]
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, *start],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_failed_demo_start_prints_the_reason_and_keeps_its_log(tmp_path: Path) -> None:
    root = Path(cleanup.__file__).resolve().parents[2]
    config = tmp_path / "demo.yaml"
    text = (root / "deploy" / "config" / "demo.yaml").read_text()
    config.write_text(re.sub(r"(?m)^  path: .*$", f"  path: {tmp_path}/none", text))
    done = subprocess.run(
        [sys.executable, str(root / "deploy" / "demo" / "demo.py"), "--config", str(config)],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert f"no model '{tmp_path}/none'" in done.stdout
    [log] = re.findall(r"(\S+) says more", done.stdout)
    assert f"no model '{tmp_path}/none'" in Path(log).read_text()
