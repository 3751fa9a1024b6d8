"""Ray and HAProxy write to a log file; the terminal shows only what its user needs."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deltafront.service.config import ConfigError
from deltafront.service.local.log_file import default_log, output_to

SERVE = """
import os, subprocess, sys
from pathlib import Path
from deltafront.service.local.log_file import output_to
with output_to(Path(sys.argv[1])) as console:
    os.write(2, b"a fatal line of C++\\n")
    print("a line of Ray's", flush=True)
    subprocess.run([sys.executable, "-c", "print('a line of a child')"], check=True)
    console.print("Ready.")
print("after")
"""


def test_process_output_goes_to_the_log_and_status_to_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    done = subprocess.run([sys.executable, "-c", SERVE, log], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("after\n", "Ready.\n")
    first, *lines = log.read_text().splitlines()
    assert first == "Log of deltafront serve"
    assert {"a fatal line of C++", "a line of Ray's", "a line of a child"} == set(lines)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_start_replaces_the_log_file_of_the_previous_start(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    for line in ("before", "now"):
        with output_to(log):
            os.write(1, f"{line}\n".encode())
    assert log.read_text().splitlines() == ["Log of deltafront serve", "now"]


def test_a_default_log_of_an_earlier_version_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = default_log(9000)
    log.write_text("without the first line\n")
    with output_to(log):
        pass
    assert log.read_text() == "Log of deltafront serve\n"


@pytest.mark.parametrize("kind", ["a text", "another user's log", "a folder", "a socket", "a block device"])
def test_refuses_to_overwrite_a_path_that_is_not_its_log(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "named"
    with socket.socket(socket.AF_UNIX) as listening:
        match kind:
            case "a text":
                path.write_text("door: {}\n")
            case "another user's log":
                _needs_root()
                path.write_text("Log of deltafront serve\n")
                os.chown(path, 12345, 12345)
            case "a folder":
                path.mkdir()
            case "a socket":
                listening.bind(str(path))
            case "a block device":
                _node(path, stat.S_IFBLK, os.makedev(7, 255))
        before = path.lstat()
        with pytest.raises(ConfigError, match=r"^--log: .*/named is no"), output_to(path):
            pass
    assert (path.lstat().st_mode, path.lstat().st_ino) == (before.st_mode, before.st_ino)


def test_log_to_a_device_does_not_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "null"
    _node(path, stat.S_IFCHR, os.makedev(1, 3))
    with output_to(path):
        os.write(1, b"a line\n")
    assert stat.S_ISCHR(path.lstat().st_mode)


def test_a_pipe_is_written_to_and_one_without_a_reader_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"^--log: .*/pipe cannot be written: "), output_to(path):
        pass
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with output_to(path):
        os.write(1, b"a line\n")
    assert os.read(reader, 100) == b"a line\n"
    os.close(reader)


@pytest.mark.parametrize("to", ["a file", "a pipe"])
def test_log_to_dev_stdout_is_this_processs_output(to: str, tmp_path: Path) -> None:
    link = tmp_path / "stdout"
    link.symlink_to("/proc/self/fd/1")
    command = [sys.executable, "-c", SERVE, str(link)]
    with (tmp_path / "out").open("a+") as file:
        output = subprocess.PIPE if to == "a pipe" else file
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=True)
        file.seek(0)
        written = done.stdout if to == "a pipe" else file.read()
    assert written.splitlines() == ["a fatal line of C++", "a line of Ray's", "a line of a child", "after"]
    assert done.stderr == "Ready.\n" and link.is_symlink()


def test_log_follows_a_link_unless_another_user_owns_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before\n")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    with output_to(link):
        os.write(1, b"a line\n")
    assert (tmp_path / "file").read_text() == "before\na line\n" and link.is_symlink()
    _needs_root()
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(ConfigError, match=r"^--log: "), output_to(link):
        pass


def _needs_root() -> None:
    if os.geteuid():
        pytest.skip("only root may give files away")


def _node(path: Path, kind: int, device: int) -> None:
    try:
        os.mknod(path, kind | 0o600, device)
    except PermissionError:
        pytest.skip("devices cannot be made here")


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"^--log: .*/none/serve\.log cannot be written: "),
        output_to(tmp_path / "none" / "serve.log"),
    ):
        pass


def test_default_logs_differ_by_port_in_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, other = default_log(9000), default_log(9001)
    assert one.parent == other.parent and one != other
    assert stat.S_IMODE(one.parent.stat().st_mode) == 0o700


def test_refuses_a_log_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link of another user could redirect what the service writes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"deltafront-logs-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is another user's"):
        default_log(9000)
