"""Finds the reason of a failed start.

Serve reports a replica's error as nested tracebacks in a text. The last error in it is the reason.
"""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^(?P<kind>(?:\w+\.)*_*[A-Z]\w*(?:Error|Exception)): *(?!Traceback )(?P<message>\S.*)$")
"""The last line of a traceback."""
_OURS = "deltafront."
_PERMANENT = {
    "AssertionError",
    "AttributeError",
    "FileNotFoundError",
    "ImportError",
    "KeyError",
    "MemoryError",
    "_ArrayMemoryError",
    "ModuleNotFoundError",
    "NotImplementedError",
    "OutOfMemoryError",
    "TypeError",
    "ValueError",
}
_DIED = {"ActorDiedError", "ActorUnavailableError", "WorkerCrashedError", "NodeDiedError", "OwnerDiedError"}
_LONGEST_REASON = 400


class StartError(RuntimeError):
    """The message is one line."""


def failure_reason(error: BaseException | str) -> str:
    """The reason in one line."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    kind, message = _last_error(text)
    if kind in _DIED:
        return f"a process ended while the service started ({kind}); is there enough memory?"
    if kind in ("GetTimeoutError", "RpcError"):
        return f"Ray did not answer in time ({message})"
    return message[:_LONGEST_REASON]


def is_permanent(text: str) -> bool:
    """Whether a retry would fail too: after our own errors and programming mistakes."""
    errors = _errors(text)
    return bool(errors) and (errors[-1][0].startswith(_OURS) or errors[-1][0].split(".")[-1] in _PERMANENT)


def _last_error(text: str) -> tuple[str, str]:
    """Kind and message. A third party's message begins with its kind."""
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
