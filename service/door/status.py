"""Errors as gRPC statuses and back: the one table of codes, for the door and for the Python client.

Codes are named as gRPC names them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import grpc

from ..errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    DeltafrontError,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    RemoteError,
    Unauthenticated,
    Unavailable,
)

RETRY_AFTER = "retry-after"
"""Trailing metadata: whole seconds to wait before trying again."""
PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata that gRPC's own retries obey; negative means: do not retry."""
_LONGEST_DETAILS = 1000
"""Characters of details sent: gRPC's default limit for all trailers together is 8 KiB."""

STATUS: Mapping[Code, grpc.StatusCode] = {code: grpc.StatusCode[code.name] for code in Code}
_PLAIN = (NotFound, Overloaded, DeadlineExceeded, Unauthenticated, Unavailable, Cancelled, Internal)
"""Errors that are made of a message alone."""
_KINDS = {STATUS[kind.code]: kind for kind in _PLAIN}


def status(error: DeltafrontError) -> grpc.StatusCode:
    return STATUS[error.code]


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
    """The client's side of the table: the error that a status stands for."""
    retry_after_s = None
    for key, value in metadata:
        if key == RETRY_AFTER:
            retry_after_s = float(value)
    if code is STATUS[Code.INVALID_ARGUMENT]:
        field, colon, rest = message.partition(": ")
        return InvalidArgument(field, rest) if colon and " " not in field else InvalidArgument("", message)
    if code in _KINDS:
        return _KINDS[code](message, retry_after_s=retry_after_s)
    return RemoteError(code.name, message or code.name, retry_after_s=retry_after_s)
