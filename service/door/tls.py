"""The door's gRPC port with TLS, which Serve's ports do not support.

The doors of a node share the port by SO_REUSEPORT. A changed certificate applies only to new connections.
"""

import logging
import secrets
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from deltafront.service.door.registration import (
    Entrance,
    add_deltafront_to_server,
    add_health_to_server,
    add_reflection_to_server,
)
from deltafront.service.errors import Unauthenticated
from deltafront.service.request.handler import Headers
from deltafront.workers.waits import said_when_slow

log = logging.getLogger(__name__)

_WATCHES_PER_CONNECTION = 4


def ends(certificate: Path) -> float:
    """Return when a PEM file's first certificate expires, in seconds since the epoch. Raises OSError or
    ValueError."""
    try:
        decoded = ssl._ssl._test_decode_cert(str(certificate))  # type: ignore[attr-defined]
    except ssl.SSLError as error:
        raise ValueError(f"{certificate} has no certificate: {error}") from None
    return float(ssl.cert_time_to_seconds(decoded["notAfter"]))


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files. `client_ca` signs clients' certificates; None: clients need no certificate."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def check(self) -> None:
        """Check that the files can be used together. Raises OSError or ValueError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
        except ssl.SSLError as error:
            raise ValueError(f"{self.certificate} and {self.key} cannot be used: {error.reason}") from None

    def read(self) -> grpc.ServerCertificateConfiguration:
        roots = None if self.client_ca is None else self.client_ca.read_bytes()
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], roots)

    def stamps(self) -> list[tuple[int, int]]:
        paths = [path for path in (self.certificate, self.key, self.client_ca) if path is not None]
        return [(path.stat().st_mtime_ns, path.stat().st_size) for path in paths]


class Certificates:
    """Tracks when the certificates of this process expire.

    Args:
        door: The door's certificate, read again when its file changes.
        ray: Ray's certificate, read once.
    """

    def __init__(self, door: Path | None, ray: Path | None = None) -> None:
        self._paths = {name: path for name, path in (("door", door), ("ray", ray)) if path is not None}
        self._stamps: dict[str, int] = {}

    def changed(self) -> Iterator[tuple[str, float]]:
        """Yield name and expiry (seconds since the epoch) of certificates that have changed since the last
        call.
        """
        for name, path in self._paths.items():
            if name == "ray" and name in self._stamps:
                continue
            try:
                stamp, end = path.stat().st_mtime_ns, None
                if stamp != self._stamps.get(name):
                    end = ends(path)
            except (OSError, ValueError):
                continue  # _Reloading logs the error
            self._stamps[name] = stamp
            if end is not None:
                yield name, end


class _Reloading:
    """Reads changed certificates. gRPC calls it at every handshake."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamps = files.stamps()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new certificate; None if the files are unchanged, or while key and certificate do not
        match."""
        try:
            stamps = self._files.stamps()
            if stamps == self._stamps:
                return None
            self._files.check()
            configuration = self._files.read()
        except (OSError, ValueError) as error:
            log.warning("new certificates cannot be used yet: %s", error)
            return None
        self._stamps = stamps
        log.info("the certificates were read again")
        return configuration


class Gate:
    """Adds a secret header to requests on the TLS port, and refuses requests without it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._mark = ("deltafront-encrypted", secrets.token_hex(16))

    def marked(self, headers: Headers) -> list[tuple[str, str | bytes]]:
        return [*headers, self._mark]

    def check(self, headers: Headers) -> None:
        """Refuse requests that did not come through the TLS port. Raises Unauthenticated."""
        if self._mark not in list(headers):
            raise Unauthenticated(
                f"this port is not encrypted: use TLS, on port {self._port}, where gRPC alone is spoken; "
                "for HTTP end TLS at a proxy and set door.tls_only: false"
            )


class TlsPort:
    def __init__(
        self, door: Any, files: TlsFiles, gate: Gate, address: str, max_message_bytes: int, max_calls: int
    ) -> None:
        """Bind the port. Raises OSError or ValueError for unusable files.

        Args:
            address: host:port; port 0: any free port.
            max_calls: Maximum concurrent calls. gRPC refuses more before it reads them.
        """
        files.check()
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=max_calls,
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.http2.max_ping_strikes", 0),  # any number: clients ask whether this machine lives
            ],
        )
        servicer = _Servicer(door, gate)
        entrance = Entrance(max_message_bytes, door, gate.marked, _WATCHES_PER_CONNECTION)
        add_deltafront_to_server(servicer, self._server, entrance)
        add_health_to_server(servicer, self._server, entrance)
        add_reflection_to_server(servicer, self._server)
        reloading: Any = _Reloading(files)  # gRPC's type hints forbid None, which means no change
        credentials = grpc.dynamic_ssl_server_credentials(
            files.read(), reloading, require_client_authentication=files.client_ca is not None
        )
        self.port = self._server.add_secure_port(address, credentials)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Stop the server. Running requests get `grace_s` seconds to end."""
        with said_when_slow(lambda: f"requests through the TLS port, which have {grace_s:g} s to end"):
            await self._server.stop(grace_s)


class _Servicer:
    """The TLS port's gRPC servicer. It calls a door's methods with the arguments that Serve gives them."""

    def __init__(self, door: Any, gate: Gate) -> None:
        self._door = door
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._door, name)
        return lambda request, context: method(request, grpc_context=_Context(context, self._gate))


class _Context:
    def __init__(self, context: Any, gate: Gate) -> None:
        self._context = context
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._gate.marked(self._context.invocation_metadata())
