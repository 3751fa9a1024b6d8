"""OpenAI's error objects."""

import re
from collections.abc import Mapping
from typing import Any

from deltafront.service.door.edges.errors import TOO_LARGE, FieldNames, status_of
from deltafront.service.door.json_body import NamedNotFound
from deltafront.service.errors import DeltafrontError, TooLong

_CLIENT_ERROR, _SERVER_ERROR = "invalid_request_error", "server_error"
_KINDS: Mapping[int, tuple[str, str | None]] = {
    401: (_CLIENT_ERROR, "invalid_api_key"),
    404: (_CLIENT_ERROR, "session_not_found"),
    TOO_LARGE: (_CLIENT_ERROR, "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    499: (_SERVER_ERROR, "cancelled"),
    500: (_SERVER_ERROR, "internal_error"),
    503: (_SERVER_ERROR, "unavailable"),
    504: (_SERVER_ERROR, "deadline_exceeded"),
}
"""OpenAI's type and code for each HTTP status."""
RENAMED = (
    (re.compile(r"^sampling\."), ""),
    (re.compile(r"^attention\.options"), "options"),
    (re.compile(r"^attention(\.name)?"), "method"),
    (re.compile(r"^session_ttl$"), "session_ttl_s"),
    (re.compile(r"^deadline$"), "timeout_s"),
    (re.compile(r"^constraint\.json_schema$"), "response_format"),
    (re.compile(r"^constraint\."), "structured_outputs."),
    (re.compile(r"^(prompt|append)\.messages\.(chat_template_kwargs|tools)"), r"\2"),
)


def error_object(
    message: str, kind: str = _CLIENT_ERROR, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: DeltafrontError, names: FieldNames, positions: int) -> dict[str, Any]:
    """Make OpenAI's error object.

    Args:
        positions: The model's context length. Clients recognise a too long prompt by OpenAI's wording, which
            contains the context length.
    """
    status = status_of(error)
    kind, code = _KINDS.get(status, (_CLIENT_ERROR, None))
    param, message = names.say(error)
    if isinstance(error, NamedNotFound):
        param, code = error.param, error.openai_code
    elif isinstance(error, TooLong):
        code = "context_length_exceeded"
    if isinstance(error, TooLong) or status == TOO_LARGE:
        shown = f" ({code})" if isinstance(error, TooLong) else ""  # some clients show only the message
        message = f"This model's maximum context length is {positions} tokens{shown}. {message}"
    return error_object(message, kind, param, code)
