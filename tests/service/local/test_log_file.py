"""Ray's and HAProxy's lines go to a file; the terminal keeps what a person needs."""

from __future__ import annotations

import os
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
    print("a line of Ray's")
    subprocess.run([sys.executable, "-c", "print('a line of a child')"], check=True)
    console.print("Ready.")
print("after")
"""


def test_what_processes_write_is_in_the_log_and_what_a_person_needs_on_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    done = subprocess.run([sys.executable, "-c", SERVE, log], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("after\n", "Ready.\n")
    assert {"a fatal line of C++", "a line of Ray's", "a line of a child"} == set(
        log.read_text().splitlines()
    )
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_start_replaces_the_log_of_the_last(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("before\n")
    with output_to(log):
        os.write(1, b"now\n")
    assert log.read_text() == "now\n"


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"^--log: .*/none/serve\.log cannot be written: "),
        output_to(tmp_path / "none" / "serve.log"),
    ):
        pass


def test_services_of_other_ports_have_other_logs_in_a_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, other = default_log(9000), default_log(9001)
    assert one.parent == other.parent and one != other
    assert stat.S_IMODE(one.parent.stat().st_mode) == 0o700


def test_a_folder_that_is_a_strangers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link, by which somebody else would have us write where they choose."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"deltafront-logs-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is another user's"):
        default_log(9000)
