"""One exception tree for door and client; each error carries its code.

An edge maps the codes to its protocol (`door/status.py` for gRPC). Messages are for the person at the other
end: what is wrong and what to do, never a traceback.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Code(StrEnum):
    """What kind of error it is, in gRPC's words; also the outcome that metrics count."""

    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    UNAUTHENTICATED = "unauthenticated"
    UNAVAILABLE = "unavailable"
    CANCELLED = "cancelled"
    INTERNAL = "internal"
    UNKNOWN = "unknown"


class DeltafrontError(Exception):
    """Base of all. retry_after_s: when trying again may help (None: unknown or never)."""

    code: ClassVar[Code]

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidArgument(DeltafrontError):
    """The request can never work; `field` names the part to change."""

    code = Code.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class TooLong(InvalidArgument):
    """What is to be read does not fit the model's positions."""


class NotFound(DeltafrontError):
    """No such session for this token."""

    code = Code.NOT_FOUND


class Overloaded(DeltafrontError):
    """Not enough room now (retry_after_s set) or ever (None)."""

    code = Code.RESOURCE_EXHAUSTED


class DeadlineExceeded(DeltafrontError):
    """The request's deadline passed, or could not be met by an idle service."""

    code = Code.DEADLINE_EXCEEDED


class TooSlow(DeadlineExceeded):
    """The request itself did not arrive in time, whatever its deadline."""


class Unauthenticated(DeltafrontError):
    """No token, or one that the server does not know."""

    code = Code.UNAUTHENTICATED


class Unavailable(DeltafrontError):
    """Workers are missing or died, and replaying did not help."""

    code = Code.UNAVAILABLE


class ConnectionLost(Unavailable):
    """Client side only: no status of the service's own ended the call. Its door died, or a proxy let go of
    it."""


class Cancelled(DeltafrontError):
    """The client went away."""

    code = Code.CANCELLED


class Internal(DeltafrontError):
    """A fault in the service; details are in its log."""

    code = Code.INTERNAL


class RemoteError(DeltafrontError):
    """Client side only: a status that no error stands for (from a proxy, or another kind of server).

    status: its name in the protocol."""

    code = Code.UNKNOWN

    def __init__(self, status: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.status = status


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


class WorkerHandoffFailed(WorkerFailed):
    """A prompt's K/V did not get from prefill to its decode worker."""
