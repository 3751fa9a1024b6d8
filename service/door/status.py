"""Errors as gRPC statuses and back, for the door and the Python client."""

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import grpc

from deltafront.service import errors
from deltafront.service.errors import Code, DeltafrontError

RETRY_AFTER = "retry-after"
"""Trailing metadata: whole seconds to wait before a retry."""
PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata for gRPC's own retries. A negative value forbids them."""
OWN_STATUS = "deltafront-status"
"""Trailing metadata: the service itself gave the status, not a proxy or gRPC."""
_LOST_CONNECTION = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.NOT_FOUND,
)
"""Statuses of a lost connection. NOT_FOUND comes from an HAProxy that does not know the doors yet."""
_MAX_DETAILS_BYTES = 3000
"""The longest percent-encoded error message. By default gRPC limits all trailers to 8 KiB."""

STATUS: Mapping[Code, grpc.StatusCode] = {code: grpc.StatusCode[code.name] for code in Code}
_OTHER_ARGUMENTS = (errors.InvalidArgument, errors.RemoteError)
_ERRORS = {STATUS[e.code]: e for e in DeltafrontError.__subclasses__() if e not in _OTHER_ARGUMENTS}


def status(error: DeltafrontError) -> grpc.StatusCode:
    return STATUS[error.code]


def details(error: DeltafrontError) -> str:
    """Shorten an error's message to one line of bounded length."""
    line = " ".join(error.message.split())
    sizes = map(_sent_bytes, line[: _MAX_DETAILS_BYTES + 1])
    ends = list(itertools.accumulate(sizes, initial=0))
    if ends[-1] <= _MAX_DETAILS_BYTES:
        return line
    return line[: bisect.bisect(ends, _MAX_DETAILS_BYTES - _sent_bytes("…")) - 1] + "…"


def _sent_bytes(character: str) -> int:
    """Return a character's bytes in a gRPC message, which percent-encodes `%` and all but printable ASCII."""
    return 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())


def trailers(error: DeltafrontError) -> list[tuple[str, str]]:
    own = (OWN_STATUS, error.code.value)
    if error.retry_after_s is not None:
        seconds = max(error.retry_after_s, 0.0)
        return [own, (RETRY_AFTER, str(math.ceil(seconds))), (PUSHBACK, str(round(seconds * 1000)))]
    if isinstance(error, errors.Overloaded):
        return [own, (PUSHBACK, "-1")]
    return [own]


def set_status(context: Any, error: DeltafrontError) -> None:
    context.set_code(status(error))
    context.set_details(details(error))
    context.set_trailing_metadata(trailers(error))


def is_ours(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    return any(key == OWN_STATUS for key, _value in metadata)


def not_ours(code: grpc.StatusCode | int) -> tuple[grpc.StatusCode, str]:
    """Translate a gRPC status that Serve or Ray set. code: an enum member or its number."""
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    if code in (exhausted, exhausted.value[0]):
        return exhausted, "this server works on as many requests as it may: try again"
    return grpc.StatusCode.UNAVAILABLE, "the server that had the request is gone: send it again"


def from_status(
    code: grpc.StatusCode, message: str, metadata: Iterable[tuple[str, str | bytes]] = ()
) -> DeltafrontError:
    sent = dict(metadata)
    if code in _LOST_CONNECTION and OWN_STATUS not in sent:
        return errors.ConnectionLost(f"the connection to the service was lost ({code.name.lower()})")
    retry_after_s = float(sent[RETRY_AFTER]) if RETRY_AFTER in sent else None
    if code is STATUS[Code.INVALID_ARGUMENT]:
        field, colon, rest = message.partition(": ")
        named = colon and " " not in field
        return errors.InvalidArgument(field, rest) if named else errors.InvalidArgument("", message)
    if code in _ERRORS:
        return _ERRORS[code](message, retry_after_s=retry_after_s)
    return errors.RemoteError(code.name, message or code.name, retry_after_s=retry_after_s)
