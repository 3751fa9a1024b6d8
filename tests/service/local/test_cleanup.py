"""Cleanup after a killed service: the processes that write to its folder, and the folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltafront.service.local import cleanup

from ..inprocess import wait_until

OWNER = """
import os, subprocess, sys, tempfile, time
from deltafront.service.local.cleanup import service_folder
tempfile.tempdir = sys.argv[1]
with service_folder() as folder:
    child = [sys.executable, "-c", "import os, time; os.setsid(); time.sleep(1000)"]
    started = subprocess.Popen(child, stdout=open(folder / "log", "w"))
    print(folder, started.pid, flush=True)
    sys.stdin.readline()
"""


class Owner:
    """A process that owns a folder, and its child process that writes there."""

    def __init__(self, temporary: Path) -> None:
        command = [sys.executable, "-c", OWNER, str(temporary)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        folder, child = self.process.stdout.readline().split()
        self.folder, self.child = Path(folder), int(child)

    def reapers(self) -> list[int]:
        """Return the reapers that wait for the owner's death."""
        asked = f"{cleanup.__file__}\0{self.folder}\0".encode()
        return [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if asked in read(p)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def runs(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    return b"\nState:\tZ" not in (status := read(Path(f"/proc/{pid}/status"))) and bool(status)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    made = Owner(tmp_path)
    yield made
    made.kill()
    for pid in [made.child, *made.reapers()]:
        if runs(pid):
            os.kill(pid, signal.SIGKILL)


def test_reaper_cleans_up_at_once_after_a_kill(owner: Owner) -> None:
    assert runs(owner.child) and owner.folder.exists()
    owner.kill()
    wait_until(lambda: not runs(owner.child), "its process is left")
    wait_until(lambda: not owner.folder.exists(), "its folder is left")
    wait_until(lambda: not owner.reapers(), "the reaper is left")


def test_clean_stop_leaves_no_process_or_file(owner: Owner) -> None:
    wait_until(
        lambda: bool(owner.reapers()), "no reaper waits"
    )  # `ps` shows its command a moment after its start
    owner.process.communicate("end\n")
    assert not runs(owner.child) and not owner.folder.exists() and not owner.reapers()


def test_next_start_cleans_up_if_the_reaper_was_killed(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cleanup.clean_up_killed_services() == [], "its owner lives"
    for pid in owner.reapers():
        os.kill(pid, signal.SIGKILL)
    owner.kill()
    assert runs(owner.child) and owner.folder.exists()
    assert cleanup.clean_up_killed_services() == [owner.folder]
    assert not runs(owner.child) and not owner.folder.exists()


def test_folder_without_a_lock_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be new, or may not belong to a service."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "deltafront-made").mkdir()
    assert cleanup.clean_up_killed_services() == [] and (tmp_path / "deltafront-made").exists()


CLEAN_UP = """
import sys, tempfile
from deltafront.service.local.cleanup import clean_up_killed_services
tempfile.tempdir = sys.argv[1]
print(clean_up_killed_services())
"""


@pytest.mark.parametrize("kind", ["a pipe", "a link to a file of ours", "a lock in another's folder"])
def test_forged_lock_neither_hangs_a_start_nor_gets_removed(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "deltafront-x"
    folder.mkdir()
    match kind:
        case "a pipe":
            os.mkfifo(folder / "owner.lock")
        case "a link to a file of ours":
            (tmp_path / "ours").touch()
            (folder / "owner.lock").symlink_to(tmp_path / "ours")
        case "a lock in another's folder":
            if os.geteuid():
                pytest.skip("only root may give files away")
            (folder / "owner.lock").touch()
            os.chown(folder, 12345, 12345)
    command = [sys.executable, "-c", CLEAN_UP, str(tmp_path)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.fail("it waits for who made the pipe")
    assert (done.stdout, done.stderr) == ("[]\n", "") and folder.is_dir()


def test_process_that_only_reads_the_folder_is_not_killed(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("line\n")
    reader = subprocess.Popen(["tail", "-f", tmp_path / "log"], stdout=subprocess.DEVNULL)
    try:
        assert reader.pid not in list(cleanup.writers(tmp_path))
    finally:
        reader.kill()
        reader.wait()
