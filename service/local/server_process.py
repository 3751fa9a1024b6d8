"""Run `deltafront serve` as a child process and wait until it is healthy.

For whoever needs a whole service for a while: the demo, the end-to-end tests, the benchmarks. The child's
output goes to a log file, whose end is shown when it does not come up.
"""

from __future__ import annotations

import contextlib
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

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..config import load
from ..listening import joined, reachable

_STOP_S = 60.0
_LOG_LINES = 30
"""Of the log's end, shown when it does not come up."""


class NotServing(RuntimeError):
    """The service did not become healthy; the message ends with the last lines of its log."""


class LocalService:
    """`with LocalService("deploy/config/demo.yaml") as service:` serves on `service.address`.

    Leaving the block stops it: SIGTERM, then, after _STOP_S seconds, SIGKILL to the process group that this
    object started. Temporary files of the service are in a folder of this object's, which goes where it has
    ended well, and else stays for its log. Raises ConfigError for a configuration that cannot be used.
    """

    def __init__(
        self,
        config: Path | str,
        *,
        start_s: float = 240.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        door = load(Path(config)).door
        self.address = joined(reachable(door.host), door.grpc_port)
        self._command = [
            sys.executable,
            "-m",
            "deltafront.service.cli.main",
            "serve",
            "--config",
            str(config),
        ]
        self._start_s = start_s
        self._folder = Path(tempfile.mkdtemp(prefix="deltafront-"))
        self._command += ["--log", str(self._folder / "ray.log")]
        own = {"TORCHINDUCTOR_CACHE_DIR": str(self._folder)}  # torch makes it wherever that is
        self._environment = {**os.environ, **own, **(environment or {})}
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
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
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
        if self.stop() == 0 and kind is None:
            shutil.rmtree(self._folder, ignore_errors=True)  # what was killed may still be closing files

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        until = time.monotonic() + self._start_s
        with grpc.insecure_channel(self.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < until:
                code = self._process.poll()
                if code is not None:
                    raise NotServing(f"the service ended with code {code}:\n{self.log_tail()}")
                try:
                    reply = health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                except grpc.RpcError:
                    time.sleep(0.5)
                    continue
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                time.sleep(0.5)
        raise NotServing(f"the service was not healthy within {self._start_s:.0f} s:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])

    def stop(self) -> int | None:
        """Stop it and wait until it is gone; its exit status. None where it does not run (any more)."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
