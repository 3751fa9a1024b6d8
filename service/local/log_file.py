"""Where Ray, Serve and HAProxy write to while `deltafront serve` runs: a file, so that the terminal shows
what a person needs."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from ..config import ConfigError


def default_log(grpc_port: int) -> Path:
    """One file for each port, in a folder of this user's; a start replaces it. Raises ConfigError for a
    folder that another user has made."""
    folder = Path(tempfile.gettempdir()) / f"deltafront-logs-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"--log: {folder} is another user's: name a file")
    return folder / f"serve-{grpc_port}.log"


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[Console]:
    """Send the output of this process and its children to the file while the block runs; the console that
    it gives still writes to standard error. Raises ConfigError if the file cannot be made."""
    try:
        path.unlink(missing_ok=True)  # who reads the last start's may go on
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"--log: {path} cannot be written: {error.strerror}") from None
    with _instead(1, log), _instead(2, log) as terminal, os.fdopen(terminal, "w", closefd=False) as stream:
        os.close(log)
        yield Console(file=stream)


@contextlib.contextmanager
def _instead(number: int, log: int) -> Iterator[int]:
    """A file descriptor leads to the log; gives one to where it led before."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(number)
    os.dup2(log, number)
    try:
        yield before
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(before, number)
        os.close(before)
