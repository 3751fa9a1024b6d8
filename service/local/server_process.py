"""Runs `deltafront serve` as a child process, for the demo, tests and benchmarks."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from deltafront.service.config import load
from deltafront.service.listening import joined, reachable
from deltafront.service.local.readiness import SERVING, health
from deltafront.workers.waits import said_when_slow

log = logging.getLogger(__name__)

_STOP_S = 60.0
_LOG_LINES = 30


class NotServing(RuntimeError):
    """The service does not run. The message ends with the last lines of the log."""


class LocalService:
    """`with LocalService("deploy/config/demo.yaml") as service:` serves on `service.address`.

    The service's folder is removed unless it ended with an error. Raises ConfigError.
    """

    def __init__(
        self, config: Path | str, *, start_s: float = 900.0, environment: dict[str, str] | None = None
    ) -> None:
        door = load(Path(config)).door
        self.address = joined(reachable(door.host), door.grpc_port)
        self._start_s = start_s
        self._folder = Path(tempfile.mkdtemp(prefix="deltafront-"))
        command = [sys.executable, "-m", "deltafront.service.cli.main", "serve"]
        self._command = [*command, "--config", str(config), "--log", str(self._folder / "ray.log")]
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self._folder)}  # torch would make this folder elsewhere
        self._environment = {**os.environ, **cache, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.log = self._folder / "serve.log"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the service is not running")
        return self._process.pid

    def __enter__(self) -> LocalService:
        host, _, port = self.address.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port))):
            raise NotServing(f"{self.address} is taken: stop what serves there first")
        with self.log.open("wb") as log:
            output: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen(
                self._command, env=self._environment, start_new_session=True, **output
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the service. If the `with` block failed, its folder and log are kept."""
        if self.stop() == 0 and kind is None:
            shutil.rmtree(self._folder, ignore_errors=True)  # a killed process may still close files

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_s
        with grpc.insecure_channel(self.address) as channel:
            while time.monotonic() < deadline:
                if (code := self._process.poll()) is not None:
                    raise NotServing(f"the service ended with code {code}:\n{self.log_tail()}")
                if health(channel) == SERVING:
                    return
                time.sleep(0.5)
        raise NotServing(f"the service was not healthy within {self._start_s:.0f} s:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])

    def stop(self) -> int | None:
        """Stop the service and return its exit status; None if it does not run. After _STOP_S seconds it is
        killed."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.terminate()
        with said_when_slow(lambda: f"the service to stop (process {process.pid}); its log is {self.log}"):
            try:
                return process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                log.warning("the service has not stopped in %g s, and is killed; see %s", _STOP_S, self.log)
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()
