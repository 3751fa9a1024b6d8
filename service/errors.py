"""One exception tree for door and client, and the one table that maps it to gRPC status codes.

Messages are for the person at the other end: what is wrong and what to do, never a traceback.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import grpc

RETRY_AFTER = "retry-after"
"""Trailing metadata: whole seconds to wait before trying again."""
PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata that gRPC's own retries obey; negative means: do not retry."""
_LONGEST_DETAILS = 1000
"""Characters of details sent: gRPC's default limit for all trailers together is 8 KiB."""


class DeltafrontError(Exception):
    """Base of all. retry_after_s: when trying again may help (None: unknown or never)."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> grpc.StatusCode:
        return STATUS.get(type(self), grpc.StatusCode.INTERNAL)


class InvalidArgument(DeltafrontError):
    """The request can never work; `field` names the part to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class NotFound(DeltafrontError):
    """No such session for this token."""


class Overloaded(DeltafrontError):
    """Not enough room now (retry_after_s set) or ever (None)."""


class DeadlineExceeded(DeltafrontError):
    """The request's deadline passed, or could not be met by an idle service."""


class Unauthenticated(DeltafrontError):
    """No token, or one that the server does not know."""


class Unavailable(DeltafrontError):
    """Workers are missing or died, and replaying did not help."""


class Cancelled(DeltafrontError):
    """The client went away."""


class Internal(DeltafrontError):
    """A fault in the service; details are in its log."""


class RemoteError(DeltafrontError):
    """Client side only: a status outside the table (from a proxy, or another kind of server)."""

    def __init__(self, code: grpc.StatusCode, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self._code = code

    @property
    def code(self) -> grpc.StatusCode:
        return self._code


STATUS: Mapping[type[DeltafrontError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Cancelled: grpc.StatusCode.CANCELLED,
    Internal: grpc.StatusCode.INTERNAL,
}


class WorkerError(Exception):
    """A worker failed a request; the door may replay it. `worker` is the actor's name."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker
        self.message = message


class WorkerLost(WorkerError):
    """The worker itself is gone (died, or its node did)."""


class WorkerFailed(WorkerError):
    """The worker lives and says that this request failed."""


def details(error: DeltafrontError) -> str:
    """The message as sent: one line, bounded."""
    line = " ".join(error.message.split())
    return line if len(line) <= _LONGEST_DETAILS else line[: _LONGEST_DETAILS - 1] + "…"


def trailers(error: DeltafrontError) -> list[tuple[str, str]]:
    """Trailing metadata: when to come back, for people's scripts and for gRPC's own retries."""
    if error.retry_after_s is not None:
        seconds = max(error.retry_after_s, 0.0)
        return [(RETRY_AFTER, str(math.ceil(seconds))), (PUSHBACK, str(round(seconds * 1000)))]
    if isinstance(error, Overloaded):
        return [(PUSHBACK, "-1")]
    return []


def from_status(
    code: grpc.StatusCode, message: str, metadata: Iterable[tuple[str, str | bytes]] = ()
) -> DeltafrontError:
    """The client's side of the table: the exception that a status stands for."""
    retry_after_s = None
    for key, value in metadata:
        if key == RETRY_AFTER:
            retry_after_s = float(value)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field, colon, rest = message.partition(": ")
        return InvalidArgument(field, rest) if colon and " " not in field else InvalidArgument("", message)
    for kind, status in STATUS.items():
        if status is code:
            return kind(message, retry_after_s=retry_after_s)
    return RemoteError(code, message, retry_after_s=retry_after_s)
