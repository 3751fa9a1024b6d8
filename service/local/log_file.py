"""The log file that Ray, Serve and HAProxy write to while `deltafront serve` runs."""

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
    """Return the port's file in this user's folder. Raises ConfigError if the folder is another user's."""
    folder = Path(tempfile.gettempdir()) / f"deltafront-logs-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"--log: {folder} is another user's: name a file")
    return folder / f"serve-{grpc_port}.log"


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[Console]:
    """Redirect the output of this process and its children to a new file. Yields a console on standard error.
    Raises ConfigError if the file cannot be made.
    """
    try:
        path.unlink(missing_ok=True)  # somebody may still read the last start's log
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"--log: {path} cannot be written: {error.strerror}") from None
    with _redirected(1, log), _redirected(2, log) as stderr, os.fdopen(stderr, "w", closefd=False) as stream:
        os.close(log)
        yield Console(file=stream)


@contextlib.contextmanager
def _redirected(descriptor: int, log: int) -> Iterator[int]:
    """Point a descriptor at the log. Yields a duplicate of the original."""
    _flush()
    original = os.dup(descriptor)
    os.dup2(log, descriptor)
    try:
        yield original
    finally:
        _flush()
        os.dup2(original, descriptor)
        os.close(original)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
