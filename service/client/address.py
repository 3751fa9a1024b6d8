"""Explains wrong addresses."""

from __future__ import annotations

import re

from ..errors import InvalidArgument

_SCHEME = re.compile(r"(https?|grpcs?)://", re.IGNORECASE)
_RESOLVED = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:")
"""gRPC's other address schemes."""
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
"""Part of gRPC's message → the argument that is wrong, and what to do."""


def check_address(address: str) -> None:
    """Raise InvalidArgument if it is not host:port."""
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
