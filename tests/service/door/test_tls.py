"""TLS and mutual TLS at the door's own port, changed certificates, and refusal of unencrypted requests."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deltafront.service.client import DeltafrontClient, Tls
from deltafront.service.config import ConfigError
from deltafront.service.door.tls import Certificates, Gate, TlsPort
from deltafront.service.errors import InvalidArgument, Overloaded, Unauthenticated, Unavailable
from deltafront.service.fleet.fleet_view import FleetView
from deltafront.service.metrics import Metrics
from deltafront.service.wiring import authenticator, observer, tls_files
from deltafront.workers import waits

from ..inprocess import HANG_S, House, settings, wait_until
from ..pki import Authority
from ..reflection import reflected
from ..test_requests import collect, expected, ids, nothing_left


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


@pytest.fixture
def opened() -> list[tuple[House, TlsPort]]:
    return []


@pytest.fixture
def secure(
    make_house: Callable[..., House], authority: Authority, opened: list[tuple[House, TlsPort]]
) -> Iterator[Callable[..., tuple[House, str]]]:
    """Start a door with a TLS port: secure(client_ca=…, **door settings) returns the door and the port's
    address."""

    def make(client_ca: Path | None = None, **door: object) -> tuple[House, str]:
        certificate, key = authority.sign("server")
        files = {"tls_certificate": str(certificate), "tls_key": str(key)}
        if client_ca is not None:
            files["tls_client_ca"] = str(client_ca)
        house = make_house(**files, **door)
        found = tls_files(house.config.door)
        assert found is not None

        async def start() -> TlsPort:
            address = "127.0.0.1:0"  # gRPC binds both addresses of localhost to one port, which may be shared
            port = TlsPort(house.door, found, house.gate, address, 1 << 24, 1 << 10)
            await port.start()
            return port

        port = house.loop.run(start())
        opened.append((house, port))
        return house, f"localhost:{port.port}"

    yield make
    for house, port in opened:
        house.loop.run(port.stop(5.0))


def test_certificate_expiry_is_a_metric(authority: Authority, tmp_path: Path) -> None:
    """A changed certificate of the door is read again; Ray's certificate is read once."""
    certificate, _ = authority.sign("server")
    day = time.time() + 86_400
    watched = Certificates(certificate, certificate)
    assert [(name, pytest.approx(end, abs=HANG_S)) for name, end in watched.changed()] == [
        ("door", day),
        ("ray", day),
    ]
    assert not [*watched.changed()]
    authority.sign("server")
    os.utime(certificate, (0, 0))
    assert [name for name, _ in watched.changed()] == ["door"]
    certificate.write_text("no certificate")
    assert not [*watched.changed()]
    metrics = Metrics(tmp_path / "metrics")
    observer(metrics, Certificates(authority.ca))(FleetView(groups={}, workers={}))
    (line,) = re.findall(
        r'^deltafront_certificate_expiry_timestamp_seconds\{certificate="door"\} (\S+)$',
        metrics.expose().decode(),
        re.MULTILINE,
    )
    assert float(line) == pytest.approx(day, abs=HANG_S)


def test_requests_are_answered_over_tls(
    secure: Callable[..., tuple[House, str]], authority: Authority
) -> None:
    house, address = secure()
    with DeltafrontClient(address, tls=Tls(authority.ca)) as client:
        text, *_ = collect(client.generate("hello", max_tokens=5))
        assert text == expected(ids("hello"), 5)
        assert client.info().vocabulary == 258
    nothing_left(house)
    credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    with grpc.secure_channel(address, credentials) as channel:
        health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        serving = health_pb2.HealthCheckResponse.SERVING
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S).status == serving
        assert next(health.Watch(health_pb2.HealthCheckRequest(), timeout=HANG_S)).status == serving
        assert (
            reflected(channel, "v1") == reflected(channel, "v1alpha") >= {"deltafront.v1.DeltafrontService"}
        )


def test_client_without_the_ca_cannot_connect(
    secure: Callable[..., tuple[House, str]], tmp_path: Path
) -> None:
    _, address = secure()
    stranger = Authority(tmp_path / "other")
    for tls in (Tls(stranger.ca), False):
        with DeltafrontClient(address, tls=tls, retry_s=0) as client, pytest.raises(Unavailable):
            client.info()


def test_mutual_tls_requires_a_client_certificate(
    secure: Callable[..., tuple[House, str]], authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "other")
    _, address = secure(client_ca=authority.ca)
    with DeltafrontClient(address, tls=Tls(authority.ca, *authority.sign("ann"))) as client:
        assert client.info().vocabulary == 258
    for tls in (Tls(authority.ca), Tls(authority.ca, *stranger.sign("ann"))):
        with DeltafrontClient(address, tls=tls, retry_s=0) as client, pytest.raises(Unavailable):
            client.info()


def test_tls_port_answers_any_number_of_pings(
    secure: Callable[..., tuple[House, str]], authority: Authority
) -> None:
    """Clients ping while they wait; gRPC's servers by default close the connection at the third ping."""
    _, address = secure()
    host, _, port = address.partition(":")
    context = ssl.create_default_context(cafile=authority.ca)
    context.set_alpn_protocols(["h2"])
    settings_frame, ping = bytes(3) + b"\x04" + bytes(5), b"\x00\x00\x08\x06" + bytes(5 + 8)
    pong = b"\x00\x00\x08\x06\x01" + bytes(4 + 8)
    with (
        socket.create_connection((host, int(port)), HANG_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings_frame)
        received = b""
        for number in range(10):
            connection.sendall(ping)
            while received.count(pong) <= number:
                more = connection.recv(1 << 16)
                assert more, received
                received += more


def test_refuses_requests_that_are_not_encrypted(
    secure: Callable[..., tuple[House, str]], authority: Authority
) -> None:
    house, _ = secure()
    forged = [("deltafront-encrypted", "0" * 32)]
    with DeltafrontClient(house.address) as client:
        client._connection.metadata = forged
        for call in (client.info, lambda: list(client.generate("x")), lambda: client.cancel("x")):
            with pytest.raises(Unauthenticated, match="not encrypted: use TLS, on port 9443"):
                call()
    with grpc.insecure_channel(house.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        reply = health.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    lenient, _ = secure(tls_only=False)
    with DeltafrontClient(lenient.address) as client:
        assert client.info().vocabulary == 258


def test_refusal_of_plain_http_names_a_tls_proxy(
    secure: Callable[..., tuple[House, str]], make_http: Callable[[House], str]
) -> None:
    """The TLS port serves only gRPC."""
    house, _ = secure()
    refused = httpx.get(f"{make_http(house)}/v1/models")
    assert refused.status_code == 401
    message = refused.json()["error"]["message"]
    assert "gRPC alone" in message and "for HTTP end TLS at a proxy and set door.tls_only: false" in message
    lenient, _ = secure(tls_only=False)
    assert httpx.get(f"{make_http(lenient)}/v1/models").status_code == 200


def test_tls_requests_need_a_bearer_token_too(
    secure: Callable[..., tuple[House, str]], authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("alpha\n")
    _, address = secure(tokens_file=str(tmp_path / "tokens"))
    with DeltafrontClient(address, "alpha", tls=Tls(authority.ca)) as client:
        assert client.info().vocabulary == 258
    with DeltafrontClient(address, "beta", tls=Tls(authority.ca)) as client, pytest.raises(Unauthenticated):
        client.info()


def test_new_certificates_need_no_restart(
    secure: Callable[..., tuple[House, str]], authority: Authority, tmp_path: Path
) -> None:
    _, address = secure()
    successor = Authority(tmp_path / "successor")
    certificate, key = successor.sign("server")
    with DeltafrontClient(address, tls=Tls(authority.ca)) as before:
        before.info()
        os.replace(key, authority.folder / "server.key")  # the new key does not match the old certificate
        with DeltafrontClient(address, tls=Tls(authority.ca)) as client:
            assert client.info().vocabulary == 258
        os.replace(certificate, authority.folder / "server.pem")
        with DeltafrontClient(address, tls=Tls(successor.ca)) as client:
            assert client.info().vocabulary == 258
        with (
            DeltafrontClient(address, tls=Tls(authority.ca), retry_s=0) as client,
            pytest.raises(Unavailable),
        ):
            client.info()
        assert before.info().vocabulary == 258


def test_tls_port_refuses_requests_above_the_limit(
    secure: Callable[..., tuple[House, str]], authority: Authority
) -> None:
    house, address = secure(max_requests=1)
    house.decode.pause_at = 1
    with DeltafrontClient(address, tls=Tls(authority.ca)) as client:
        stream = client.generate("x", max_tokens=5)
        next(stream)
        with pytest.raises(Overloaded):
            list(client.generate("y", max_tokens=5))
        house.decode.pause_at = -1
        list(stream)


def test_client_takes_tls_files_from_the_environment(
    secure: Callable[..., tuple[House, str]], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = secure(client_ca=authority.ca)
    certificate, key = authority.sign("ann")
    monkeypatch.setenv("DELTAFRONT_TLS_CA", str(authority.ca))
    monkeypatch.setenv("DELTAFRONT_TLS_CERTIFICATE", str(certificate))
    with pytest.raises(InvalidArgument, match="are needed together"):
        DeltafrontClient(address, tls=True)
    monkeypatch.setenv("DELTAFRONT_TLS_KEY", str(key))
    with DeltafrontClient(address, tls=True) as client:
        assert client.info().vocabulary == 258
    monkeypatch.setenv("DELTAFRONT_TLS_CA", "/nowhere.pem")
    with pytest.raises(InvalidArgument, match=r"/nowhere\.pem cannot be read"):
        DeltafrontClient(address, tls=True)


def test_start_refuses_unusable_tls_files(authority: Authority, model: Path) -> None:
    certificate, key = authority.sign("server")
    other, _ = authority.sign("other")
    assert tls_files(settings(model).door) is None
    for files, says in (
        ((other, key), "cannot be used"),
        ((Path("/nowhere.pem"), key), "No such file"),
        ((key, key), "cannot be used"),
    ):
        door = settings(model, tls_certificate=str(files[0]), tls_key=str(files[1])).door
        with pytest.raises(ConfigError, match=rf"door\.tls_certificate: .*{says}"):
            tls_files(door)
    door = settings(model, tls_certificate=str(certificate), tls_key=str(key)).door
    assert authenticator(door, Gate(1)).gate is not None


def test_a_stopping_tls_port_says_how_long_it_waits_for_requests(
    secure: Callable[..., tuple[House, str]],
    opened: list[tuple[House, TlsPort]],
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    house, address = secure()
    ((_, port),) = opened
    house.decode.pause_at = 1
    with DeltafrontClient(address, tls=Tls(authority.ca)) as client:
        stream = client.generate("x", max_tokens=5)
        next(stream)
        monkeypatch.setattr(waits, "SLOW_S", 0.01)
        stopping = asyncio.run_coroutine_threadsafe(port.stop(HANG_S), house.loop.loop)
        says = f"after 0.01 s, waits for requests through the TLS port, which have {HANG_S:g} s to end"
        wait_until(lambda: says in caplog.messages, "nothing is said")
        house.decode.pause_at = -1
        text, *_ = collect(stream)
        stopping.result(HANG_S)
    assert text == expected(ids("x"), 5)
