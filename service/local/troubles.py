"""Prints problems that delay a service: too little memory, and workers that die repeatedly.

Ray and Serve report these problems only in the log and in Serve's status.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from deltafront.service.local.readiness import failure_reason

_KILLED = re.compile(r"(\d+) Workers? \(tasks / actors\) killed due to memory pressure")
_PERIOD_S = 2.0

Say = Callable[[str], object]


class Troubles:
    """Looks for problems in threads of its own, during a `with` block.

    Args:
        log: The file to which Ray writes.
        status: `serve.status`, which may fail or wait for a missing control store.
        say: Prints a line.
    """

    def __init__(self, log: Path, status: Callable[[], Any], name: str, say: Say) -> None:
        self._log, self._status, self._name, self._say = log, status, name, say
        self._told: dict[str, str] = {}
        self._end = threading.Event()
        self._read = 0

    def __enter__(self) -> "Troubles":
        for look in (self.look_at_log, self.look_at_workers):  # Serve's status may never return
            threading.Thread(target=self._run, args=(look,), daemon=True, name="troubles").start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end.set()

    def _run(self, look: Callable[[], None]) -> None:
        while not self._end.wait(_PERIOD_S):
            look()

    def look_at_log(self) -> None:
        """Print new problems from the log."""
        for line in killed_for_memory(self._new_lines()):
            self._say(line)

    def look_at_workers(self) -> None:
        """Print workers that restart for a new reason."""
        try:
            application = self._status().applications.get(self._name)
        except Exception:  # Ray starts or ends, which others report
            return
        for name, line in deaths(application):
            if self._told.get(name) != line and not self._end.is_set():
                self._told[name] = line
                self._say(line)

    def _new_lines(self) -> list[str]:
        if not self._log.is_file():
            return []
        with self._log.open("rb") as file:
            file.seek(self._read)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").splitlines()


def killed_for_memory(lines: Iterable[str]) -> Iterator[str]:
    """Yield a message for each log line of Ray that counts workers killed for memory."""
    for line in lines:
        if (match := _KILLED.search(line)) and int(match[1]):
            yield (
                f"memory is short: Ray has killed {match[1]} workers, and starts them again; end other "
                "programs, or configure less (decode.cache_tokens, prefill.cache_tokens, fewer workers)"
            )


def deaths(application: Any) -> Iterator[tuple[str, str]]:
    """Yield each deployment with a replica that has died or failed to start, and the reason in one line."""
    for name, deployment in {} if application is None else application.deployments.items():
        if deployment.status != "HEALTHY" and "rror" in deployment.message:
            yield name, f"{name} starts again: {failure_reason(deployment.message)}"
