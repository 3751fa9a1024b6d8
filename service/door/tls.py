"""A gRPC port of the door's own that speaks TLS, since Serve's cannot.

Every door of a node listens on the same port (SO_REUSEPORT): the kernel gives each connection to one of those
that live. Certificates are read again when their files change, for connections that begin afterwards.
"""

from __future__ import annotations

import logging
import secrets
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ..errors import Unauthenticated
from ..request.handler import Headers
from .registration import HEALTH, SERVICE, Receiving, add_deltafront_to_server, add_health_to_server

_STREAMS = {method.name for one in (SERVICE, HEALTH) for method in one.methods if method.server_streaming}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. client_ca: who must have signed a client's certificate; None: clients need none."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def check(self) -> None:
        """Raises OSError or ValueError for files that cannot be served with."""
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
        given = [path for path in (self.certificate, self.key, self.client_ca) if path is not None]
        return [(path.stat().st_mtime_ns, path.stat().st_size) for path in given]


class _Reloading:
    """What gRPC asks for certificates at every handshake."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamps = files.stamps()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """None: as before. While a pair is being replaced, key and certificate may not fit each other yet."""
        try:
            stamps = self._files.stamps()
            if stamps == self._stamps:
                return None
            self._files.check()
            found = self._files.read()
        except (OSError, ValueError) as error:
            log.warning("new certificates cannot be used yet: %s", error)
            return None
        self._stamps = stamps
        log.info("the certificates were read again")
        return found


class Gate:
    """Knows what came through the port that speaks TLS, by a mark that nobody outside can make."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._mark = ("deltafront-encrypted", secrets.token_hex(16))

    def marked(self, headers: Headers) -> list[tuple[str, str | bytes]]:
        return [*headers, self._mark]

    def check(self, headers: Headers) -> None:
        """Raises Unauthenticated for what came in the clear."""
        if self._mark not in list(headers):
            raise Unauthenticated(
                f"this port is not encrypted: use TLS, on port {self._port}, where gRPC alone is spoken; "
                "for HTTP end TLS at a proxy and set door.tls_only: false"
            )


class TlsPort:
    """Serves a `FrontDoor` with TLS. Make, start and stop it on one event loop."""

    def __init__(
        self, door: Any, files: TlsFiles, gate: Gate, address: str, max_message_bytes: int, max_calls: int
    ) -> None:
        """Raises OSError or ValueError for files that cannot be used. address: host:port; port 0: any.
        max_calls: of all kinds at once; gRPC refuses more before it reads them."""
        files.check()
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=max_calls,
            options=[("grpc.max_receive_message_length", max_message_bytes)],
        )
        servicer = _Servicer(door, gate)
        receiving = Receiving(max_message_bytes)
        add_deltafront_to_server(servicer, self._server, receiving)
        add_health_to_server(servicer, self._server, receiving)
        reloading: Any = _Reloading(files)  # gRPC's types do not know that None means: as before
        credentials = grpc.dynamic_ssl_server_credentials(
            files.read(), reloading, require_client_authentication=files.client_ca is not None
        )
        self.port = self._server.add_secure_port(address, credentials)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no new requests; what is under way has so many seconds to end."""
        await self._server.stop(grace_s)


class _Servicer:
    """Calls a door as Serve does: by name, with the context as `grpc_context`."""

    def __init__(self, door: Any, gate: Gate) -> None:
        self._door = door
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._door, name)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async for message in method(request, grpc_context=_Context(context, self._gate)):
                yield message

        async def unary(request: Any, context: Any) -> Any:
            return await method(request, grpc_context=_Context(context, self._gate))

        return stream if name in _STREAMS else unary


class _Context:
    """gRPC's context, with the gate's mark among the metadata."""

    def __init__(self, context: Any, gate: Gate) -> None:
        self._context = context
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._gate.marked(self._context.invocation_metadata())
