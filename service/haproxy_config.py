"""Makes HAProxy refuse with JSON as the doors do, by rewriting Serve's configuration.

The program of `haproxy.py` runs this file, so it imports only the standard library.
"""

import itertools
import json
import os
import re
import sys
from pathlib import Path

LONGEST_HEADERS = 16_384
"""The most bytes of a request's headers. Longer headers get 431, and beyond _BUFFER HAProxy's own 400."""
_BUFFER = 65_536
HEAD_S = 10
"""How long a client may take to send a request's headers. Otherwise HAProxy would wait as long as bytes
arrive. Its 408 has no JSON body."""
SILENCE_S = 30
"""How long a client may pause while it sends a request or receives an answer. A client that waits for an
answer may be silent for longer."""
SOURCE_VARIABLE = "DELTAFRONT_CONNECTIONS_PER_ADDRESS"
_PER_SOURCE = 1000
"""The most connections of one address to a port."""
_INTERNAL = 64
"""The most connections to each of statistics and metrics."""
_FRONTENDS = ("frontend http_frontend", "frontend grpc_frontend")
_MAXCONN = re.compile(r"^ *maxconn (\d+)$", re.MULTILINE)
_DEFAULT_MAXCONN = 4096
_WATCH = "{ path /grpc.health.v1.Health/Watch }"
_WATCHES = 4
"""The most streams of one connection."""
_HTTP, _GRPC = _FRONTENDS
_TABLE = "deltafront_watches"
_SERVE_READS = (
    "x-request-id",
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    *(f"x{a}session{b}id" for a in "-_" for b in "-_"),
    *(f"serve{a}multiplexed{b}model{c}id" for a in "-_" for b in "-_" for c in "-_"),
    "traceparent",
    "tracestate",
)
"""Headers that Serve decodes as UTF-8."""
_UNAVAILABLE = "no door can answer: it died, or is starting; try again"
_BAD_REQUEST = (
    "this is no HTTP that can be read, or its sender closed the connection before the answer, if only on its "
    "own side: that ends a request"
)
_RETRY = "5"
_REQUEST_ID = "^[!-~]{1,128}$"
"""The form of an `x-request-id` that a caller may send (`service/request/check.py`)."""
_MARK = " # deltafront"


def rewrite(config: str, folder: Path) -> str:
    """Change Serve's configuration. A second call changes nothing. folder: has the bodies of error pages."""
    lines, settings = [], ("errorfile ", "tune.bufsize ", "timeout http-request ", "timeout client ")
    most = _MAXCONN.search(config)
    clients = (int(most[1]) if most else _DEFAULT_MAXCONN) // 2 - _INTERNAL
    for line in config.splitlines():
        if not line.endswith(_MARK) and not line.lstrip().startswith(settings):
            added = [*_limits(line.strip(), clients), *_added_after(line.strip(), folder)]
            lines += [line, *(f"    {ours}{_MARK}" for ours in added)]
    if _GRPC in lines:
        table = "stick-table type string len 64 size 100k expire 10m store conn_cur"
        lines += [f"backend {_TABLE}{_MARK}", f"    {table}{_MARK}"]
    return "".join(f"{line}\n" for line in lines)


def _limits(line: str, clients: int) -> list[str]:
    """Limit the connections of each port and each address, so that no port or address can use up the
    connections of the others."""
    if line in ("frontend prometheus", "listen stats"):
        return [f"maxconn {_INTERNAL}"]
    if line not in _FRONTENDS:
        return []
    per_source = int(os.environ.get(SOURCE_VARIABLE, _PER_SOURCE))
    limits = [
        f"maxconn {clients}",
        "stick-table type ipv6 size 100k expire 30s store conn_cur",
        f"tcp-request connection reject if {{ src_conn_cur ge {per_source} }}",
        "tcp-request connection track-sc0 src",
    ]
    return limits if per_source else limits[:1]


def _added_after(line: str, folder: Path) -> list[str]:
    if line == _GRPC:
        refusal = "hdr grpc-status 8 hdr grpc-message 'this connection watches the health as often as it may'"
        return [
            f"http-request set-var-fmt(txn.connection) %[src]:%[src_port] if {_WATCH}",
            f"http-request track-sc1 var(txn.connection) table {_TABLE} if {_WATCH}",
            f"http-request return status 200 content-type application/grpc {refusal} "
            f"if {_WATCH} {{ sc1_conn_cur({_TABLE}) gt {_WATCHES} }}",
        ]
    if line == "global":
        return [f"tune.bufsize {_BUFFER}"]
    if line == "defaults":
        unavailable = [f"errorfile {status} {folder / '503.http'}" for status in (502, 503, 504)]
        timeouts = [f"timeout http-request {HEAD_S}s", f"timeout client {SILENCE_S}s"]
        return [*timeouts, f"errorfile 400 {folder / '400.http'}", *unavailable]
    if line == _HTTP:
        too_long = f"the headers are longer than {LONGEST_HEADERS} bytes"
        other = "!{ res.hdr(content-type) -m beg application/json }"
        return [
            *_request_ids(),
            *_visible_only(),
            f"http-request {_answer(431, too_long)} if {{ req.hdrs -m len gt {LONGEST_HEADERS} }}",
            f"http-response {_answer(400, _BAD_REQUEST)} if {{ status 400 }} {other}",
            f"http-response {_answer(503, _UNAVAILABLE)} hdr retry-after {_RETRY} "
            f"if {{ status ge 500 }} {other}",
        ]
    return []


def _visible_only() -> list[str]:
    """Refuse headers that Serve cannot decode. Otherwise Serve fails, and clients see a missing door."""
    return [
        f"http-request {_answer(400, f'{name}: must be visible ASCII characters')} "
        f"if {{ req.fhdr({name}) -m reg '[^ -~]' }}"
        for name in _SERVE_READS
    ]


def _request_ids() -> list[str]:
    """Give every answer one request id, the caller's or a new one. Doors log the same id."""
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
