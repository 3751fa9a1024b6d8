"""Errors as gRPC statuses and back: the one table of codes, for the door and for the Python client.

Codes are named as gRPC names them.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping

import grpc

from ..errors import (
    Cancelled,
    Code,
    ConnectionLost,
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
OURS = "deltafront-status"
"""Trailing metadata: the status is the service's own word, and does not come from a proxy or from gRPC."""
_BETWEEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.NOT_FOUND,
)
"""What a lost connection looks like, depending on who notices; the last is the word of an HAProxy that has
just started and knows of no door yet."""
_LONGEST_DETAILS = 3000
"""Bytes of details as gRPC sends them, percent-encoded; its default limit for all trailers is 8 KiB."""

STATUS: Mapping[Code, grpc.StatusCode] = {code: grpc.StatusCode[code.name] for code in Code}
_PLAIN = (NotFound, Overloaded, DeadlineExceeded, Unauthenticated, Unavailable, Cancelled, Internal)
"""Errors that are made of a message alone."""
_KINDS = {STATUS[kind.code]: kind for kind in _PLAIN}


def status(error: DeltafrontError) -> grpc.StatusCode:
    return STATUS[error.code]


def details(error: DeltafrontError) -> str:
    """The message as sent: one line, bounded."""
    line = " ".join(error.message.split())
    sizes = map(_sent_bytes, line[: _LONGEST_DETAILS + 1])
    ends = list(itertools.accumulate(sizes, initial=0))
    if ends[-1] <= _LONGEST_DETAILS:
        return line
    return line[: bisect.bisect(ends, _LONGEST_DETAILS - _sent_bytes("…")) - 1] + "…"


def _sent_bytes(character: str) -> int:
    """Of details: gRPC makes three of each byte that is not printable ASCII, and of `%`."""
    return 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())


def trailers(error: DeltafrontError) -> list[tuple[str, str]]:
    """Trailing metadata: whose word it is, and when to come back, for people's scripts and for gRPC's own
    retries."""
    ours = (OURS, error.code.value)
    if error.retry_after_s is not None:
        seconds = max(error.retry_after_s, 0.0)
        return [ours, (RETRY_AFTER, str(math.ceil(seconds))), (PUSHBACK, str(round(seconds * 1000)))]
    if isinstance(error, Overloaded):
        return [ours, (PUSHBACK, "-1")]
    return [ours]


def is_ours(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    return any(key == OURS for key, _value in metadata)


def not_ours(code: grpc.StatusCode | int) -> tuple[grpc.StatusCode, str]:
    """What a status of Serve's or Ray's is shown as. code: as gRPC keeps it, a member or its number."""
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    if code in (exhausted, exhausted.value[0]):
        return exhausted, "this server works on as many requests as it may: try again"
    return grpc.StatusCode.UNAVAILABLE, "the server that had the request is gone: send it again"


def from_status(
    code: grpc.StatusCode, message: str, metadata: Iterable[tuple[str, str | bytes]] = ()
) -> DeltafrontError:
    """The client's side of the table: the error that a status stands for."""
    sent = dict(metadata)
    if code in _BETWEEN and OURS not in sent:
        return ConnectionLost(f"the connection to the service was lost ({code.name.lower()})")
    retry_after_s = float(sent[RETRY_AFTER]) if RETRY_AFTER in sent else None
    if code is STATUS[Code.INVALID_ARGUMENT]:
        field, colon, rest = message.partition(": ")
        return InvalidArgument(field, rest) if colon and " " not in field else InvalidArgument("", message)
    if code in _KINDS:
        return _KINDS[code](message, retry_after_s=retry_after_s)
    return RemoteError(code.name, message or code.name, retry_after_s=retry_after_s)
