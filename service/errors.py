"""The exceptions of door and client. Messages say what is wrong and what to do, in bounded length."""

from enum import StrEnum
from typing import ClassVar

_LONGEST_SHOWN = 64
_LONGEST_FIELD = 128
_LONGEST_MESSAGE = 4000


def shown(value: str) -> str:
    """Quote the beginning of a caller's value for an error message."""
    return repr(value) if len(value) <= _LONGEST_SHOWN else f"{value[:_LONGEST_SHOWN]!r}…"


def cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[:longest] + "…"


class Code(StrEnum):
    """Error codes, named as in gRPC. Metrics count them as outcomes."""

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
    """An error that clients see. retry_after_s is None if a retry never helps, or the time is unknown."""

    code: ClassVar[Code]

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        self.message = cut(message, _LONGEST_MESSAGE)
        super().__init__(self.message)
        self.retry_after_s = retry_after_s


class InvalidArgument(DeltafrontError):
    """The request is invalid. `field` names the field to change."""

    code = Code.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        self.field = cut(field, _LONGEST_FIELD)
        super().__init__(f"{self.field}: {message}" if field else message)


class TooLong(InvalidArgument):
    """The prompt is longer than the model's context."""


class NotFound(DeltafrontError):
    """The caller has no such session."""

    code = Code.NOT_FOUND


class Overloaded(DeltafrontError):
    """There is no capacity now. Without retry_after_s, capacity will never suffice for this request."""

    code = Code.RESOURCE_EXHAUSTED


class DeadlineExceeded(DeltafrontError):
    """The deadline has passed, or even an idle service would miss it."""

    code = Code.DEADLINE_EXCEEDED


class TooSlow(DeadlineExceeded):
    """The request's message took too long to arrive, whatever its deadline."""


class Unauthenticated(DeltafrontError):
    code = Code.UNAUTHENTICATED


class Unavailable(DeltafrontError):
    """Workers are missing or died, in spite of retries."""

    code = Code.UNAVAILABLE


class ConnectionLost(Unavailable):
    """In clients only: the door died, or a proxy closed the connection."""


class Cancelled(DeltafrontError):
    code = Code.CANCELLED


class Internal(DeltafrontError):
    """The service failed. Details are in its log."""

    code = Code.INTERNAL


class RemoteError(DeltafrontError):
    """In clients only: any other gRPC status. `status` is its name."""

    code = Code.UNKNOWN

    def __init__(self, status: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.status = status


class WorkerError(Exception):
    """A worker failed; the door may retry the request. `worker` is the actor's name."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker
        self.message = message


class WorkerLost(WorkerError):
    pass


class WorkerFailed(WorkerError):
    """The call failed, but the worker is alive."""


class WorkerHandoffFailed(WorkerFailed):
    pass
