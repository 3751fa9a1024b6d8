"""The lines of a batch's input, and the lines of its output and error files."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

from pydantic_core import to_json

from deltafront.service.door.batches.records import LineProblem
from deltafront.service.door.json_body import json_object
from deltafront.service.errors import InvalidArgument, shown

LINES = 50_000
"""The most lines of a batch."""
_PROBLEMS = 20
"""Problems after which an input is not read further."""
_LONGEST_ID = 512
_MAX_VALUES = 1 << 21
"""JSON values of a line: a completion's prompt may have one for each token."""


@dataclass(frozen=True)
class Line:
    """A request of a batch: where the input has it."""

    custom_id: str
    start: int
    end: int


def read_lines(
    source: BufferedReader, endpoint: str, max_line_bytes: int
) -> tuple[list[Line], list[LineProblem]]:
    """Read a batch's input, and check all but the bodies: a wrong body is an error of its line alone."""
    lines: list[Line] = []
    problems: list[LineProblem] = []
    known: set[str] = set()
    start, number = 0, 0
    while len(problems) < _PROBLEMS and (raw := source.readline(max_line_bytes + 1)):
        number += 1
        end = start + len(raw)
        if len(raw) > max_line_bytes:
            message = f"is longer than {max_line_bytes} bytes"
            problems.append(LineProblem(code="line_too_long", message=message, line=number))
            break
        if raw.strip():
            if len(lines) == LINES:
                problems.append(LineProblem(code="too_many_lines", message=f"at most {LINES} lines"))
                break
            try:
                custom_id = _custom_id(raw, endpoint, known)
            except InvalidArgument as error:
                code = "invalid_request" if error.field else "invalid_json_line"
                param = error.field or None
                problems.append(LineProblem(code=code, message=error.message, line=number, param=param))
            else:
                known.add(custom_id)
                lines.append(Line(custom_id, start, end))
        start = end
    if not lines and not problems:
        problems.append(LineProblem(code="empty_file", message="the input file has no line"))
    return lines, problems


def _custom_id(raw: bytes, endpoint: str, known: set[str]) -> str:
    """Return a line's `custom_id`. Raises InvalidArgument."""
    content = json_object(raw, _MAX_VALUES)
    custom_id = content.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _LONGEST_ID:
        raise InvalidArgument("custom_id", f"must be text of 1 to {_LONGEST_ID} characters")
    if custom_id in known:
        raise InvalidArgument("custom_id", f"{shown(custom_id)} is there twice")
    if content.get("method") != "POST":
        raise InvalidArgument("method", "must be POST")
    if content.get("url") != endpoint:
        raise InvalidArgument("url", f"must be the batch's endpoint, {endpoint}")
    if not isinstance(content.get("body"), dict):
        raise InvalidArgument("body", "must be an object")
    return custom_id


def body_of(raw: bytes) -> bytes:
    """Return the JSON of a line's request."""
    return to_json(json_object(raw, _MAX_VALUES)["body"])


def answered_line(custom_id: str, status: int, request_id: str, body: Any) -> bytes:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(custom_id, response, None)


def unanswered_line(custom_id: str, code: str, message: str) -> bytes:
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: Any, error: Any) -> bytes:
    content = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
    return json.dumps({**content, "response": response, "error": error}, ensure_ascii=False).encode() + b"\n"
