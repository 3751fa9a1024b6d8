"""Whether Ray's own processes live, without which a service on one machine cannot go on.

Ray itself waits a minute for its control store, then ends the process with a line of its own, and leaves
HAProxy on the ports.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping

PERIOD_S = 0.5
"""How often it is asked whether they live."""
NEEDED = {"gcs_server": "Ray's control store", "raylet": "Ray's node"}
"""By Ray's name for each."""


class Watch:
    """processes: Ray's, by its names."""

    def __init__(self, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
        self._processes = dict(processes)

    def lost(self) -> str:
        """Which of them has ended, and how; empty while all live."""
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                return f"{NEEDED[name]} ({name}) {_ended(code)}"
        return ""

    def wait(self) -> str:
        """Until one is lost; which."""
        while not (lost := self.lost()):
            time.sleep(PERIOD_S)
        return lost


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
