"""Waits until a service answers at its ports, or gives the reason why it does not start in one line.

Serve reports a replica's error as a text with nested tracebacks. The last error in the text is the reason.
"""

import math
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deltafront.service.listening import joined, reachable
from deltafront.service.local.ports import public_ports
from deltafront.service.settings import DoorConfig

SERVING = health_pb2.HealthCheckResponse.SERVING
_PERIOD_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^(?P<kind>(?:\w+\.)*_*[A-Z]\w*(?:Error|Exception)): *(?!Traceback )(?P<message>\S.*)$")
"""A traceback's last line."""
_OURS = "deltafront."
_PERMANENT = set(
    """AssertionError AttributeError FileNotFoundError ImportError KeyError MemoryError _ArrayMemoryError
    ModuleNotFoundError NotImplementedError OutOfMemoryError TypeError ValueError""".split()
)
_DIED = {"ActorDiedError", "ActorUnavailableError", "WorkerCrashedError", "NodeDiedError", "OwnerDiedError"}
_LONGEST_REASON = 400

Failure = Callable[[], str | None]
"""A function that describes which of Ray's processes has ended."""


class StartError(RuntimeError):
    """The service cannot start. The message is one line."""


def wait_until_running(status: Callable[[], Any], name: str, failure: Failure) -> None:
    """Wait until Serve's application runs, however long its model loads. Raises StartError when it can no
    longer start. status: The function `serve.status`."""
    while (application := status().applications.get(name)) is None or application.status != "RUNNING":
        if reason := _deployment_failure(application):
            raise StartError(reason)
        _pause(failure, math.inf, "")


def wait_until_answering(door: DoorConfig, failure: Failure, start_s: float) -> None:
    """Wait until a door answers over gRPC and all ports accept connections. Raises StartError."""
    deadline = time.monotonic() + start_s
    address = joined(reachable(door.host), door.grpc_port)
    with grpc.insecure_channel(address) as channel:
        while health(channel) is None:  # any status is an answer
            _pause(failure, deadline, f"nothing answered at {address} for {start_s:g} s")
    for purpose, _key, host, port in public_ports(door):
        while not _accepts_connections(reachable(host), port):
            _pause(
                failure, deadline, f"{purpose}: nothing listened at {joined(host, port)} for {start_s:g} s"
            )


def _pause(failure: Failure, deadline: float, timed_out: str) -> None:
    if reason := failure():
        raise StartError(reason)
    if time.monotonic() > deadline:
        raise StartError(timed_out)
    time.sleep(_PERIOD_S)


def _deployment_failure(application: Any) -> str | None:
    if application is None:
        return None
    failed = application.status == "DEPLOY_FAILED"
    deployments: Mapping[str, Any] = application.deployments
    for name, deployment in deployments.items():
        message = deployment.message
        given_up = failed or deployment.status == "DEPLOY_FAILED"
        if message and (is_permanent(message) or (given_up and "rror" in message)):
            return f"{name}: {failure_reason(message)}"
    return failure_reason(application.message) if failed else None


def health(channel: grpc.Channel) -> int | None:
    """Return a door's health status; None if the door does not answer."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S).status)
    except grpc.RpcError:
        return None


def _accepts_connections(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def failure_reason(error: BaseException | str) -> str:
    """Return an error's reason in one line."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    kind, message = _last_error(text)
    if kind in _DIED:
        return f"a process ended while the service started ({kind}); is there enough memory?"
    if kind in ("GetTimeoutError", "RpcError"):
        return f"Ray did not answer in time ({message})"
    return message[:_LONGEST_REASON]


def is_permanent(text: str) -> bool:
    """Return whether a retry would fail, too: true for our own errors and for programming errors."""
    errors = _errors(text)
    return bool(errors) and (errors[-1][0].startswith(_OURS) or errors[-1][0].split(".")[-1] in _PERMANENT)


def _last_error(text: str) -> tuple[str, str]:
    errors = _errors(text)
    if not errors:
        lines = [line.strip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
        return "", lines[-1] if lines else "no reason was given"
    name, message = errors[-1]
    kind = name.split(".")[-1].lstrip("_")
    clear = name.startswith(_OURS) or kind in ("RuntimeError", "AssertionError")
    return kind, message if clear else f"{kind}: {message}"


def _errors(text: str) -> list[tuple[str, str]]:
    lines = (line.strip() for line in _COLOUR.sub("", text).splitlines())
    return [(match["kind"], match["message"]) for match in map(_ERROR.match, lines) if match]
