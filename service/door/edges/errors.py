"""HTTP statuses and headers of errors, and their field names over HTTP."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from deltafront.service.door.json_body import NotJson
from deltafront.service.errors import (
    Code,
    DeadlineExceeded,
    DeltafrontError,
    InvalidArgument,
    Overloaded,
    TooSlow,
)
from deltafront.service.request.rates import RateLimited, RateState, Unit

_STATUSES: Mapping[Code, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.NOT_FOUND: 404,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,
    Code.INTERNAL: 500,
    Code.UNKNOWN: 500,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
"""The HTTP status of each error code. No client sees 499, because the client has left."""
TOO_LARGE = 413
RATE_HEADERS = tuple(
    f"x-ratelimit-{name}-{unit}" for unit in get_args(Unit) for name in ("limit", "remaining", "reset")
)
"""OpenAI's headers of a caller's limits per minute."""
_SOURCE = re.compile(r"^(prompt|append)(\.(text|messages|token_ids))?")

Renaming = tuple[re.Pattern[str], str]


def status_of(error: DeltafrontError) -> int:
    """Return an error's HTTP status. Overloaded is 429, but 413 without retry_after_s, because then waiting
    cannot help."""
    if isinstance(error, Overloaded) and error.retry_after_s is None:
        return TOO_LARGE
    if isinstance(error, TooSlow):
        return 408
    return 415 if isinstance(error, NotJson) else _STATUSES[error.code]


def headers_of(error: DeltafrontError) -> dict[str, str]:
    """Return retry headers. OpenAI's and Anthropic's clients retry by themselves unless a header forbids
    it."""
    if error.retry_after_s is not None:
        rates = rate_headers(error.states) if isinstance(error, RateLimited) else {}
        return {"retry-after": str(math.ceil(max(error.retry_after_s, 0.0))), **rates}
    if _is_late(error):
        return {"x-should-retry": "false"}
    return {"www-authenticate": "Bearer"} if error.code is Code.UNAUTHENTICATED else {}


def rate_headers(states: Iterable[RateState]) -> dict[str, str]:
    """Return the RATE_HEADERS for the limits that the caller has."""
    headers: dict[str, str] = {}
    for state in states:
        names = (name for name in RATE_HEADERS if name.endswith(state.unit))
        values = f"{state.limit}", f"{state.remaining}", f"{math.ceil(state.reset_s)}s"
        headers |= dict(zip(names, values, strict=True))
    return headers


@dataclass(frozen=True)
class FieldNames:
    """Field names of one protocol.

    Args:
        source: Replaces gRPC's `prompt` and `append`.
        renamed: Patterns of gRPC's other names, with their replacements.
    """

    source: str
    renamed: Sequence[Renaming]

    def say(self, error: DeltafrontError) -> tuple[str | None, str]:
        """Return the error's field, if any, and its message, both with this protocol's field names."""
        message = error.message.replace("the deadline", "timeout_s")
        if _is_late(error):
            return "timeout_s", message.partition(";")[0]  # leave out the advice to compare clocks
        if not (isinstance(error, InvalidArgument) and error.field):
            return None, message
        param = error.field
        for pattern, replacement in self.renamed:
            param = pattern.sub(replacement, param)
        param = param if param == self.source else _SOURCE.sub(self.source, param, count=1)
        return param, f"{param}{error.message.removeprefix(error.field)}"


def _is_late(error: DeltafrontError) -> bool:
    """Say whether the client's own deadline ended the request."""
    return isinstance(error, DeadlineExceeded) and not isinstance(error, TooSlow)
