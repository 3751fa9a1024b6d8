"""Makes HAProxy refuse with JSON as the doors do, by rewriting Serve's configuration.

The program of `haproxy.py` runs this file, so it imports only the standard library.
"""

import itertools
import json
import sys
from pathlib import Path

LONGEST_HEADERS = 16_384
"""Bytes. Longer ones get 431, and HAProxy's own 400 beyond _BUFFER."""
_BUFFER = 65_536
RECEIVE_S = 60
"""How long a client may take to send the head of a request: as long as for its body, which the door waits
for. HAProxy would wait as long as bytes come, and it holds 4,096 clients. Its 408 has no words of ours."""
_HTTP = "frontend http_frontend"
_UNAVAILABLE = "no door can answer: it died, or is starting; try again"
_BAD_REQUEST = (
    "this is no HTTP that can be read, or its sender closed the connection before the answer, if only on its "
    "own side: that ends a request"
)
_RETRY = "5"
_REQUEST_ID = "^[!-~]{1,128}$"
"""What a caller may send as `x-request-id` (`service/request/check.py`)."""
_MARK = " # deltafront"


def rewrite(config: str, folder: Path) -> str:
    """Change Serve's configuration. A second change adds nothing. folder: where HAProxy finds the bodies of
    refusals."""
    lines, settings = [], ("errorfile ", "tune.bufsize ", "timeout http-request ")
    for line in config.splitlines():
        if not line.endswith(_MARK) and not line.lstrip().startswith(settings):
            lines += [line, *(f"    {ours}{_MARK}" for ours in _added_after(line.strip(), folder))]
    return "".join(f"{line}\n" for line in lines)


def _added_after(line: str, folder: Path) -> list[str]:
    if line == "global":
        return [f"tune.bufsize {_BUFFER}"]
    if line == "defaults":
        unavailable = [f"errorfile {status} {folder / '503.http'}" for status in (502, 503, 504)]
        return [f"timeout http-request {RECEIVE_S}s", f"errorfile 400 {folder / '400.http'}", *unavailable]
    if line == _HTTP:
        too_long = f"the headers are longer than {LONGEST_HEADERS} bytes"
        other = "!{ res.hdr(content-type) -m beg application/json }"
        return [
            *_request_ids(),
            f"http-request {_answer(431, too_long)} if {{ req.hdrs -m len gt {LONGEST_HEADERS} }}",
            f"http-response {_answer(400, _BAD_REQUEST)} if {{ status 400 }} {other}",
            f"http-response {_answer(503, _UNAVAILABLE)} hdr retry-after {_RETRY} "
            f"if {{ status ge 500 }} {other}",
        ]
    return []


def _request_ids() -> list[str]:
    """Give every answer one id: the caller's, or a new one. Doors are told it, and log it."""
    sent, known = "req.fhdr(x-request-id)", "var(txn.request_id)"
    refusal = _answer(400, "x-request-id: must be 1 to 128 visible ASCII characters")
    return [
        f"http-request set-{known} uuid",
        f"http-request {refusal} if {{ {sent} -m found }} !{{ {sent} -m reg {_REQUEST_ID} }}",
        f"http-request set-{known} {sent} if {{ {sent} -m found }}",
        f"http-request set-header x-request-id %[{known}]",
        f"http-after-response set-header x-request-id %[{known}] if {{ {known} -m found }}",
    ]


def _answer(status: int, message: str) -> str:
    return f"return status {status} content-type application/json string '{_error(status, message)}'"


def _error(status: int, message: str) -> str:
    kind, code = ("server_error", "unavailable") if status >= 500 else ("invalid_request_error", None)
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


def _file(status: str, message: str, *headers: str) -> str:
    body = _error(int(status[:3]), message)
    lines = (f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join((*lines, "", body))


def _rewrite_file(path: Path) -> None:
    folder = path.resolve().parent
    (folder / "400.http").write_text(_file("400 Bad Request", _BAD_REQUEST))
    unavailable = _file("503 Service Unavailable", _UNAVAILABLE, f"Retry-After: {_RETRY}")
    (folder / "503.http").write_text(unavailable)
    path.write_text(rewrite(path.read_text(), folder))


if __name__ == "__main__":
    for option, value in itertools.pairwise(sys.argv):
        if option == "-f":
            _rewrite_file(Path(value))
