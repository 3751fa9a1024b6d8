"""Ends the processes and removes the folder of a killed service.

A service locks a file in its folder, and the kernel releases the lock when the service dies. All processes of
Ray and HAProxy have an open log file in the folder. So a process that gets the lock may kill these processes
and remove the folder. A reaper process, which runs this file without the package, cleans up at once. If the
reaper was killed, too, the next start cleans up.

Environment variables cannot identify the processes, because Ray overwrites them with process titles.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _LOCK, _UNLOCKED, _SAID = "deltafront-", "owner.lock", "owner.new", "said"
EXIT_S = 5.0
"""The time in which processes exit after SIGKILL and free their ports."""


@contextlib.contextmanager
def service_folder(terminal: int | None = None, last_words: str = "") -> Iterator[Path]:
    """Make a folder that is removed when the `with` block ends or this process is killed.

    Args:
        terminal: A descriptor to which the reaper writes `last_words` if this process ends without a call of
            `said`. This process is Ray's driver, which Ray ends when its node is lost.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    with (folder / _UNLOCKED).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / _UNLOCKED).rename(folder / _LOCK)  # no process can see the file unlocked
        command = [sys.executable, "-I", "-S", __file__, str(folder), last_words]
        silent = subprocess.DEVNULL
        words = silent if terminal is None else terminal
        reaper = subprocess.Popen(  # in its own session, so that it outlives the service's process group
            command, stdin=silent, stdout=silent, stderr=words, start_new_session=True
        )
        try:
            yield folder
        finally:
            reaper.kill()
            reaper.wait()
            _clear(folder)


def said(folder: Path) -> None:
    """Record that this process has printed the reason for its end, so that the reaper writes no
    `last_words`."""
    (folder / _SAID).touch()


def clean_up_killed_services() -> list[Path]:
    """Clean up after this user's killed services. Returns their folders."""
    locks = Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}")
    return [lock.parent for lock in locks if _clear_if_dead(lock)]


def _clear_if_dead(lock: Path) -> bool:
    """Clear a lock's folder if no process holds the lock. Another user may have made a pipe in place of the
    lock; opening it must not block."""
    try:
        if lock.parent.lstat().st_uid != os.geteuid():
            return False
        with open(os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _clear(lock.parent)
    except OSError:  # the service lives, or another process clears the folder
        return False
    return True


def _clear(folder: Path) -> None:
    kill_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


def kill_processes(folder: Path) -> None:
    deadline = time.monotonic() + EXIT_S
    while (alive := list(writers(folder))) and time.monotonic() < deadline:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def writers(folder: Path) -> Iterator[int]:
    """Yield the ids of this user's other processes that write to files in the folder."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            if int(path.name) != os.getpid() and any(
                _writes_to(folder, fd) for fd in os.scandir(path / "fd")
            ):
                yield int(path.name)


def _writes_to(folder: Path, descriptor: os.DirEntry[str]) -> bool:
    try:
        mode = descriptor.stat(follow_symlinks=False).st_mode
        return bool(mode & stat.S_IWUSR) and os.readlink(descriptor.path).startswith(f"{folder}/")
    except FileNotFoundError:  # the file was closed meanwhile
        return False


if __name__ == "__main__":
    with contextlib.suppress(FileNotFoundError), Path(sys.argv[1], _LOCK).open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        if sys.argv[2:] and sys.argv[2] and not Path(sys.argv[1], _SAID).exists():
            print(sys.argv[2], file=sys.stderr, flush=True)
        _clear(Path(sys.argv[1]))
