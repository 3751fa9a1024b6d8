"""The log file that Ray, Serve and HAProxy write to while `deltafront serve` runs."""

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from deltafront.service.config import ConfigError

_FIRST_LINE = b"Log of deltafront serve\n"
"""The first line of a log, by which a later start knows that it may replace the file."""


def default_log(grpc_port: int) -> Path:
    """Return the log file for this gRPC port, in this user's folder. Raises ConfigError if another user
    owns the folder.
    """
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"--log: {folder} is another user's: name a file")
    return folder / f"serve-{grpc_port}.log"


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"deltafront-logs-{os.geteuid()}"


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[Console]:
    """Redirect the output of this process and its children to a log. Yields a console on standard error.

    The log of an earlier start is replaced. Devices, pipes and links such as /dev/stdout are appended to.
    Raises ConfigError for a file that is no such log or cannot be written.
    """
    try:
        log = _opened(path)
    except OSError as error:
        raise ConfigError(f"--log: {path} cannot be written: {error.strerror}") from None
    with _redirected(1, log), _redirected(2, log) as stderr, os.fdopen(stderr, "w", closefd=False) as stream:
        os.close(log)
        yield Console(file=stream)


def _opened(path: Path) -> int:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return _new(path)
    if stat.S_ISREG(status.st_mode):
        if not _is_log(path, status):
            raise ConfigError(f"--log: {path} is no log of deltafront serve: name another file, or remove it")
        path.unlink()  # a reader may have the earlier log open
        return _new(path)
    kind = path.stat().st_mode
    if not (stat.S_ISCHR(kind) or stat.S_ISFIFO(kind) or stat.S_ISREG(kind)) or not _is_trusted(status):
        raise ConfigError(f"--log: {path} is nothing that a log can be written to: name a file")
    # Without O_NONBLOCK, opening a pipe would wait for a reader.
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
    os.set_blocking(log, True)
    return log


def _new(path: Path) -> int:
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(log, _FIRST_LINE)
    return log


def _is_log(path: Path, status: os.stat_result) -> bool:
    if status.st_uid != os.geteuid():
        return False
    with path.open("rb") as file:
        return file.read(len(_FIRST_LINE)) in (_FIRST_LINE, b"") or path.parent == _folder()


def _is_trusted(status: os.stat_result) -> bool:
    """Return whether a link, device or pipe belongs to root or this user. Another user's link may lead
    anywhere."""
    return status.st_uid in (0, os.geteuid())


@contextlib.contextmanager
def _redirected(descriptor: int, log: int) -> Iterator[int]:
    """Redirect a descriptor to the log. Yields a duplicate of the original."""
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
