"""Waiting until a service that was started answers at its ports, or cannot.

Ports are what clients use. Serve replaces a proxy that starts too slowly by another, so a particular proxy is
not waited for.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..config import DoorConfig
from ..listening import joined, reachable
from .exposure import listens
from .start_errors import NotStarted, final, reason_of

_LOOK_S = 0.1
_ANSWER_S = 5.0
"""How long one question may take."""


def until_running(status: Callable[[], Any], name: str, lost: Callable[[], str]) -> None:
    """Wait until Serve says that the application `name` runs, however long its model takes to load. status:
    `serve.status`. lost: which process of Ray's has ended. Raises NotStarted as soon as it cannot run."""
    while (application := status().applications.get(name)) is None or application.status != "RUNNING":
        if failed := _failed(application):
            raise NotStarted(failed)
        _go_on(lost, math.inf, "")


def until_answering(door: DoorConfig, lost: Callable[[], str], start_s: float) -> None:
    """Wait until a door answers over gRPC, and every other port takes connections. Raises NotStarted."""
    until = time.monotonic() + start_s
    address = joined(reachable(door.host), door.grpc_port)
    with grpc.insecure_channel(address) as channel:
        while not _answers(channel):
            _go_on(lost, until, f"nothing answered at {address} for {start_s:g} s")
    for what, host, port in listens(door):
        while not _takes_connections(reachable(host), port):
            _go_on(lost, until, f"{what}: nothing listened at {joined(host, port)} for {start_s:g} s")


def _go_on(lost: Callable[[], str], until: float, otherwise: str) -> None:
    if trouble := lost():
        raise NotStarted(trouble)
    if time.monotonic() > until:
        raise NotStarted(otherwise)
    time.sleep(_LOOK_S)


def _failed(application: Any) -> str:
    """Why an application cannot run, with the name of the part; empty while it still may."""
    if application is None:
        return ""
    parts: Mapping[str, Any] = application.deployments
    for name, part in parts.items():
        given_up = application.status == "DEPLOY_FAILED" or part.status == "DEPLOY_FAILED"
        if part.message and (final(part.message) or (given_up and "rror" in part.message)):
            return f"{name}: {reason_of(part.message)}"
    return reason_of(application.message) if application.status == "DEPLOY_FAILED" else ""


def _answers(channel: grpc.Channel) -> bool:
    """Whether a door does, whatever it says of its health."""
    health = health_pb2_grpc.HealthStub(channel)
    try:
        health.Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)
    except grpc.RpcError:
        return False
    return True


def _takes_connections(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True
