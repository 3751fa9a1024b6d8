"""A client's TLS files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import grpc

from ..errors import InvalidArgument

_VARIABLES = {
    "ca": "DELTAFRONT_TLS_CA",
    "certificate": "DELTAFRONT_TLS_CERTIFICATE",
    "key": "DELTAFRONT_TLS_KEY",
}


@dataclass(frozen=True)
class Tls:
    """PEM files.

    Attributes:
        ca: Signed the server's certificate; by default the system's.
        certificate, key: The client's own, if the server asks.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def from_environment(cls) -> Tls:
        files = {field: os.environ.get(variable) for field, variable in _VARIABLES.items()}
        return cls(**{field: Path(file) for field, file in files.items() if file})

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises InvalidArgument for an unreadable or missing file."""
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgument("tls", "a client's certificate and its key are needed together")
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidArgument("tls", f"{path} cannot be read: {error.strerror}") from None
