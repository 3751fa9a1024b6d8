"""Changes to the configuration of the HAProxy before the doors, so that it refuses in the doors' form.

They are HTML or a bare text otherwise, and a head of more than 16 kB is none that it can read. The
configuration is Serve's own. So the program that Serve starts (`haproxy.py`) runs this file first, with
HAProxy's arguments: it changes the configuration where it lies. It imports nothing but the standard library.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

LONGEST_HEADERS = 16_384
"""Bytes; longer ones get 431. A head of more than _BUFFER gets 400, and no words of ours."""
_BUFFER = 65_536
RECEIVE_S = 60
"""How long a client may take to send the head of a request: as long as for its body, which the door waits
for. HAProxy would wait as long as bytes come, and it holds 4,096 clients. Its 408 has no words of ours."""
_HTTP = "frontend http_frontend"
_UNAVAILABLE = "no door can answer: it died, or is starting; try again"
_BAD = (
    "this is no HTTP that can be read, or its sender closed the connection before the answer, if only on its "
    "own side: that ends a request"
)
_RETRY = "5"
_MARK = " # deltafront"


def changed(config: str, folder: Path) -> str:
    """Serve's configuration with refusals in JSON, whose texts lie in `folder`. Changing it again changes
    nothing."""
    lines = []
    for line in config.splitlines():
        if not _goes(line):
            lines += [line, *(f"    {ours}{_MARK}" for ours in _after(line.strip(), folder))]
    return "".join(f"{line}\n" for line in lines)


def _goes(line: str) -> bool:
    ours = ("errorfile ", "tune.bufsize ", "timeout http-request ")
    return line.endswith(_MARK) or line.lstrip().startswith(ours)


def _after(line: str, folder: Path) -> list[str]:
    """Lines to add after a line of Serve's."""
    if line == "global":
        return [f"tune.bufsize {_BUFFER}"]
    if line == "defaults":
        bad, gone = folder / "400.http", folder / "503.http"
        answers = [f"errorfile 400 {bad}", *(f"errorfile {status} {gone}" for status in (502, 503, 504))]
        return [f"timeout http-request {RECEIVE_S}s", *answers]
    if line == _HTTP:
        words = f"the headers are longer than {LONGEST_HEADERS} bytes"
        other = "!{ res.hdr(content-type) -m beg application/json }"
        return [
            f"http-request {_answer(431, words)} if {{ req.hdrs -m len gt {LONGEST_HEADERS} }}",
            f"http-response {_answer(400, _BAD)} if {{ status 400 }} {other}",
            f"http-response {_answer(503, _UNAVAILABLE)} hdr retry-after {_RETRY} "
            f"if {{ status ge 500 }} {other}",
        ]
    return []


def _answer(status: int, words: str) -> str:
    """A rule's answer of the door's form."""
    return f"return status {status} content-type application/json string '{_error(status, words)}'"


def _error(status: int, words: str) -> str:
    ours = status >= 500
    kind, code = ("server_error", "unavailable") if ours else ("invalid_request_error", None)
    return json.dumps({"error": {"message": words, "type": kind, "param": None, "code": code}})


def _file(status: str, words: str, *headers: str) -> str:
    body = _error(int(status[:3]), words)
    every = (f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join((*every, "", body))


def _change(path: Path) -> None:
    folder = path.resolve().parent
    (folder / "400.http").write_text(_file("400 Bad Request", _BAD))
    gone = _file("503 Service Unavailable", _UNAVAILABLE, f"Retry-After: {_RETRY}")
    (folder / "503.http").write_text(gone)
    path.write_text(changed(path.read_text(), folder))


if __name__ == "__main__":
    for option, value in itertools.pairwise(sys.argv):
        if option == "-f":
            _change(Path(value))
