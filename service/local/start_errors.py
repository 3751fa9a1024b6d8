"""Why a service did not start, in one line, from the errors of Ray, Serve and the processes that they run.

Serve gives a failed replica's error as text: the traceback of an actor inside the traceback of a replica.
The reason is its last error.
"""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^(?P<kind>(?:\w+\.)*_*[A-Z]\w*(?:Error|Exception)): *(?!Traceback )(?P<says>\S.*)$")
"""The last line of a traceback."""
_OURS = "deltafront."
_FINAL = {
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
_SAY = 400
"""Longest reason, in characters."""


class NotStarted(RuntimeError):
    """A service did not start; the message is one line."""


def reason_of(error: BaseException | str) -> str:
    """The reason in an error, or in the text of one."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    kind, says = _last(text)
    if kind in _DIED:
        return f"a process ended while the service started ({kind}); is there enough memory?"
    if kind in ("GetTimeoutError", "RpcError"):
        return f"Ray did not answer in time ({says})"
    return says[:_SAY]


def final(text: str) -> bool:
    """Whether it would fail in the same way when it is tried again: errors of ours, and mistakes."""
    found = _errors(text)
    return bool(found) and (found[-1][0].startswith(_OURS) or found[-1][0].split(".")[-1] in _FINAL)


def _last(text: str) -> tuple[str, str]:
    """Kind and words of the last error. The words of ours and of plain RuntimeErrors say it all; of others
    the kind says something."""
    found = _errors(text)
    if not found:
        lines = [line.strip() for line in _plain(text).splitlines() if line.strip()]
        return "", lines[-1] if lines else "no reason was given"
    name, says = found[-1]
    kind = name.split(".")[-1].lstrip("_")
    plain = name.startswith(_OURS) or kind in ("RuntimeError", "AssertionError")
    return kind, says if plain else f"{kind}: {says}"


def _errors(text: str) -> list[tuple[str, str]]:
    lines = (line.strip() for line in _plain(text).splitlines())
    return [(match["kind"], match["says"]) for match in map(_ERROR.match, lines) if match]


def _plain(text: str) -> str:
    return _COLOUR.sub("", text)
