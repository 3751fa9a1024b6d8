"""Watches Ray's own processes.

Ray itself notices a lost control store after a minute, and leaves HAProxy on the ports.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping

PERIOD_S = 0.5
REQUIRED = {"gcs_server": "Ray's control store", "raylet": "Ray's node"}
"""Ray's name → ours."""


class RayProcesses:
    def __init__(self, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
        self._processes = dict(processes)

    def failure(self) -> str | None:
        """Which process has ended, and how."""
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                return f"{REQUIRED[name]} ({name}) {_describe_exit(code)}"
        return None

    def wait_for_failure(self) -> str:
        while (failure := self.failure()) is None:
            time.sleep(PERIOD_S)
        return failure


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
