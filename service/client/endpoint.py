"""Checks a server's address and TLS files, and explains errors in them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import grpc

from deltafront.service.errors import InvalidArgument

_SCHEME = re.compile(r"(https?|grpcs?)://", re.IGNORECASE)
_RESOLVED = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:")
"""gRPC's address schemes, which are accepted as they are."""
_HOST_PORT = re.compile(r"(\[[^\[\]]+\]|[^\s:/\[\]]+):\d+")
_GRPC_PORT = "give the gRPC port, 9000 where none is configured"
_EXPLANATIONS = (
    ("http2 header with status: 4", "address", f"answers HTTP, but not gRPC: {_GRPC_PORT}"),
    ("failed parsing http/2", "address", f"does not speak gRPC: {_GRPC_PORT}"),
    ("wrong_version_number", "tls", "does not speak TLS: leave it out, or give the port that does"),
    ("handshake read failed", "tls", "does not speak TLS: leave it out, or give the port that does"),
    (
        "certificate_verify_failed",
        "tls",
        "has a certificate that nobody vouches for here: name who signed it in DELTAFRONT_TLS_CA",
    ),
    ("hostname verification", "tls", "has a certificate for another name: use the name that it is for"),
)
"""For parts of gRPC's messages: the wrong argument, and what to do."""

_VARIABLES = {
    "ca": "DELTAFRONT_TLS_CA",
    "certificate": "DELTAFRONT_TLS_CERTIFICATE",
    "key": "DELTAFRONT_TLS_KEY",
}


def check_address(address: str) -> None:
    """Check that an address is host:port. Raises InvalidArgument."""
    if not address:
        raise InvalidArgument("address", "is empty: give host:port")
    if _SCHEME.match(address):
        raise InvalidArgument("address", f"{address!r} is a URL: give host:port alone, of the gRPC port")
    if not address.startswith(_RESOLVED) and not _HOST_PORT.fullmatch(address):
        raise InvalidArgument("address", f"{address!r} is not host:port")


def wrong_endpoint(address: str, details: str) -> InvalidArgument | None:
    for words, argument, explanation in _EXPLANATIONS:
        if words in details.lower():
            return InvalidArgument(argument, f"{address} {explanation}")
    return None


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files for TLS.

    Attributes:
        ca: The CA of the server's certificate; by default the system's CAs.
        certificate, key: The client's own, if the server requires one.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def from_environment(cls) -> Tls:
        files = {field: os.environ.get(variable) for field, variable in _VARIABLES.items()}
        return cls(**{field: Path(file) for field, file in files.items() if file})

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises InvalidArgument for an unreadable or missing one."""
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgument("tls", "a client's certificate and its key are needed together")
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidArgument("tls", f"{path} cannot be read: {error.strerror}") from None
