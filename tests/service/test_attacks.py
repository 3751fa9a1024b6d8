"""Attacks of a stranger or of one caller, during which a good client must be served.

Each attack is bounded in count and time. Meanwhile every call of the good client must be answered, within a
bound that even a busy machine keeps; `-s` prints the longest waits.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deltafront.service.client import DeltafrontClient

from ..raw_http2 import Http2, message
from .conftest import Served, serve
from .inprocess import HANG_S, wait_until

pytestmark = [pytest.mark.service, pytest.mark.long]

MODEL = "model"
ATTACK_S = 12.0
LEAST_BOUND_S = 20.0
IDLE_TURNS = 20
STRANGER = "127.0.0.66"
"""The attackers' address."""
GENERATE = "/deltafront.v1.DeltafrontService/Generate"
CHECK, WATCH = (f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch"))
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
CHAT = "/v1/chat/completions"


class Attacked(Served):
    ports: ClassVar = {"grpc_port": 9110, "http_port": 8110, "metrics_port": 9511, "tls_port": 9512}
    address = f"127.0.0.1:{ports['grpc_port']}"
    http = f"http://127.0.0.1:{ports['http_port']}"
    metrics = f"http://127.0.0.1:{ports['metrics_port']}/metrics"
    encrypted = f"localhost:{ports['tls_port']}"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(Attacked, tmp_path_factory.mktemp("attacked"), model_name=MODEL) as served:
        with DeltafrontClient(served.address, served.token) as client:
            wait_until(lambda: client.info().decode_workers, "the door does not see its workers")
        yield served


@dataclass
class GoodClient:
    """A client that repeats calls: gRPC on one connection, HTTP and health checks on new connections."""

    served: Served
    bound_s: float = 0.0
    waits: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def measure_idle(self) -> None:
        for _ in range(IDLE_TURNS):
            self._turn(HANG_S)
        self.bound_s = LEAST_BOUND_S + 10 * max(map(max, self.waits.values()))
        print(f"\n  idle: {self.worst()}")
        assert not self.failures

    @contextlib.contextmanager
    def beside(self, attack: str) -> Iterator[None]:
        self.waits.clear()
        self.failures.clear()
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                self._turn(self.bound_s)
                over.wait(0.1)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield
        finally:
            over.set()
            asking.join()
            turns = min(map(len, self.waits.values()))
            print(f"\n  {attack}: {turns} turns, {len(self.failures)} failures, worst {self.worst()}")
        assert not self.failures, self.failures[:5]

    def worst(self) -> str:
        return ", ".join(f"{name} {max(waits):.2f} s" for name, waits in self.waits.items())

    def _turn(self, timeout_s: float) -> None:
        for name, ask in (("gRPC", self._grpc), ("HTTP", self._http), ("health", self._health)):
            began = time.monotonic()
            try:
                ask(timeout_s)
            except Exception as error:
                self.failures.append(f"{name} after {time.monotonic() - began:.1f} s: {error!r:.300}")
            self.waits.setdefault(name, []).append(time.monotonic() - began)

    def _grpc(self, timeout_s: float) -> None:
        with DeltafrontClient(self.served.address, self.served.other) as client:
            list(client.generate("hello", max_tokens=1, timeout_s=timeout_s))

    def _http(self, timeout_s: float) -> None:
        answer = post(self.served, self.served.other, chat("hello"), timeout_s)
        assert answer.status_code == 200, answer.text[:200]

    def _health(self, timeout_s: float) -> None:
        with grpc.insecure_channel(self.served.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def good(attacked: Served) -> GoodClient:
    client = GoodClient(attacked)
    client.measure_idle()
    return client


def chat(content: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1, **fields}).encode()


def post(served: Served, token: str, content: bytes, timeout_s: float = HANG_S) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    return httpx.post(served.http + CHAT, content=content, headers=headers, timeout=timeout_s)


def streams(served: Served, path: str, connections: int, each: int, body: bytes = b"", **call: Any) -> Any:
    """Begin streams that stay open, and return their connections."""
    with contextlib.ExitStack() as opened:
        found = []
        for _ in range(connections):
            found.append(Http2(served.address, STRANGER))
            opened.callback(found[-1].close)
            for _ in range(each):
                found[-1].call(path, body=body, **call)
        kept = opened.pop_all()
    return kept


def test_good_client_is_served_during_watches_without_a_token(attacked: Served, good: GoodClient) -> None:
    with (
        good.beside("2,700 Watch streams"),
        streams(attacked, WATCH, 27, 100, message(b""), ends=True),
    ):
        time.sleep(ATTACK_S)


@pytest.mark.parametrize("path", [GENERATE, CHECK, WATCH, REFLECTION])
def test_good_client_is_served_during_streams_that_send_nothing(
    attacked: Served, good: GoodClient, path: str
) -> None:
    with good.beside(f"200 streams of {path} without a message"), streams(attacked, path, 4, 50):
        time.sleep(ATTACK_S)


def test_good_client_is_served_during_one_callers_silent_streams(attacked: Served, good: GoodClient) -> None:
    token = [(b"authorization", b"Bearer " + attacked.token.encode())]
    with (
        good.beside("200 streams of one caller without a message"),
        streams(attacked, GENERATE, 4, 50, headers=token),
    ):
        time.sleep(ATTACK_S)


LONG_NAMES: dict[str, Callable[[str], bytes]] = {
    "key": lambda text: chat("hi", **{text: 1}),
    "model": lambda text: chat("hi", model=text),
    "role": lambda text: json.dumps({"model": MODEL, "messages": [{"role": text}]}).encode(),
    "field of a message": lambda text: json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "a", text: 1}]}
    ).encode(),
    "method": lambda text: chat("hi", method=text),
    "option": lambda text: chat("hi", options={text: 1}),
    "many keys": lambda text: chat("hi", **{f"{text[:60]}{n}": 1 for n in range(50_000)}),
}


@pytest.mark.parametrize("name", LONG_NAMES)
def test_good_client_is_served_during_requests_with_a_long_name(
    attacked: Served, good: GoodClient, name: str
) -> None:
    body = LONG_NAMES[name]("ab" * (3 << 20))
    over, sizes = threading.Event(), list[int]()

    def send() -> None:
        while not over.is_set():
            with contextlib.suppress(httpx.HTTPError):
                answer = post(attacked, attacked.token, body)
                assert answer.status_code in (400, 404, 429), answer.text[:200]
                sizes.append(len(answer.content))

    senders = [threading.Thread(target=send) for _ in range(4)]
    with good.beside(f"4 senders of a long {name}"):
        for sender in senders:
            sender.start()
        time.sleep(ATTACK_S)
        over.set()
        for sender in senders:
            sender.join()
    assert sizes and max(sizes) < 4096


def test_good_client_is_served_during_bodies_that_never_arrive(attacked: Served, good: GoodClient) -> None:
    with good.beside("bodies that are announced"), contextlib.ExitStack() as kept:
        for count, size in ((560, 250_000), (160, 1_900), (60, 40)):
            for _ in range(count):
                head = (
                    f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {attacked.token}\r\n"
                    "Content-Type: application/json\r\n"
                    f"Content-Length: {size}\r\n\r\n{{"
                )
                kept.enter_context(connected(attacked.ports["http_port"])).sendall(head.encode())
        time.sleep(ATTACK_S)


def crowd(port: int, count: int, kept: contextlib.ExitStack) -> None:
    """Open as many connections as this process may have files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for _ in range(min(count, most // 2)):
        one = kept.enter_context(socket.socket())
        one.setblocking(False)
        one.bind((STRANGER, 0))
        one.connect_ex(("127.0.0.1", port))


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), HANG_S, (STRANGER, 0))


@pytest.mark.parametrize("port", ["http_port", "grpc_port"])
def test_good_client_is_served_during_idle_connections(attacked: Served, good: GoodClient, port: str) -> None:
    with good.beside(f"9,000 idle connections to {port}"), contextlib.ExitStack() as kept:
        crowd(attacked.ports[port], 9_000, kept)
        time.sleep(ATTACK_S)


def test_good_client_is_served_during_idle_metrics_connections(attacked: Served, good: GoodClient) -> None:
    with good.beside("3,000 idle connections to the metrics"), contextlib.ExitStack() as kept:
        crowd(attacked.ports["metrics_port"], 3_000, kept)
        began = time.monotonic()
        assert "deltafront_" in httpx.get(attacked.metrics, timeout=HANG_S).text
        print(f"\n  metrics after {time.monotonic() - began:.2f} s")
        time.sleep(ATTACK_S)
