"""Processes and a folder that a killed service leaves behind.

A service locks a file in its folder. The kernel lets the lock go when the service is dead, however it died.
Every process of Ray's and HAProxy's has a file in that folder open to write its log. So whoever gets the lock
may end them all and remove the folder. The heir does that as soon as the service is dead: a process of
its own, which runs this file without the package. The next start does it where the heir was killed, too.

(Their environment would tell as well, but Ray's processes write their titles over it.)
"""

from __future__ import annotations

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

_PREFIX, _LOCK, _UNLOCKED = "deltafront-", "owner.lock", "owner.new"
DYING_S = 5.0
"""How long processes may take to be gone after SIGKILL, and their ports after them."""


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder that goes when the block ends, with every process that writes there; also when this process
    is killed meanwhile."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    with (folder / _UNLOCKED).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / _UNLOCKED).rename(folder / _LOCK)  # nobody sees it without its lock
        heir = _heir(folder)
        try:
            yield folder
        finally:
            heir.kill()
            heir.wait()
            clear(folder)


def _heir(folder: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: what ends the service's process group does not end it."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def sweep() -> list[Path]:
    """Clear what dead services of this user left; their folders."""
    return [path.parent for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}") if _swept(path)]


def _swept(lock: Path) -> bool:
    try:
        with lock.open() as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clear(lock.parent)
    except OSError:  # its owner lives, or another sweeps it
        return False
    return True


def clear(folder: Path) -> None:
    """End the processes of a service, and remove its folder."""
    end_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)


def end_processes(folder: Path) -> None:
    """SIGKILL to every process that writes to the folder, until none is left."""
    until = time.monotonic() + DYING_S
    while (alive := list(processes(folder))) and time.monotonic() < until:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def processes(folder: Path) -> Iterator[int]:
    """Those of this user that write to a file in the folder; not this one."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if int(path.name) != os.getpid() and any(
                _writes_to(folder, one) for one in os.scandir(path / "fd")
            ):
                yield int(path.name)


def _writes_to(folder: Path, descriptor: os.DirEntry[str]) -> bool:
    try:
        mode = descriptor.stat(follow_symlinks=False).st_mode
        return bool(mode & stat.S_IWUSR) and os.readlink(descriptor.path).startswith(f"{folder}/")
    except FileNotFoundError:  # closed meanwhile
        return False


def _inherit(folder: Path) -> None:
    """Wait until the folder's service is dead, then clear what it left. If it ended well, nothing is left."""
    with contextlib.suppress(FileNotFoundError), (folder / _LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        clear(folder)


if __name__ == "__main__":
    _inherit(Path(sys.argv[1]))
