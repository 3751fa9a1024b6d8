"""What a client needs to speak TLS: whom it believes, and who it is."""

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
    """PEM files. ca: who signed the server's certificate; None: one that the system trusts. certificate, key:
    the client's own, for a server that asks for them."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def from_environment(cls) -> Tls:
        """DELTAFRONT_TLS_CA, DELTAFRONT_TLS_CERTIFICATE and DELTAFRONT_TLS_KEY name the files."""
        given = {field: os.environ.get(variable) for field, variable in _VARIABLES.items()}
        return cls(**{field: Path(value) for field, value in given.items() if value})

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises InvalidArgument for a file that cannot be read, or one of two."""
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgument("tls", "a client's certificate and its key are needed together")
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidArgument("tls", f"{path} cannot be read: {error.strerror}") from None
