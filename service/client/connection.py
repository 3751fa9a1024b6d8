"""The parts that both clients share: channel options, token, and translation of errors."""

from __future__ import annotations

import os
import time
from typing import Any

from deltafront.service.client.endpoint import Tls, check_address, wrong_endpoint
from deltafront.service.door.status import from_status, is_ours
from deltafront.service.errors import Cancelled, ConnectionLost, DeltafrontError, InvalidArgument, Unavailable

CHANNEL = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # gRPC uses this as the timeout of connecting, too
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Pings detect that a machine is gone; gRPC sends one a minute at most. HAProxy and the TLS port answer
    # all, but gRPC's servers by default close the connection at the third within 5 minutes.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),  # any number
)
_UNREACHABLE = ("failed to connect", "errors resolving", "name resolution", "dns resolution")
"""Parts of gRPC's messages for an unreachable server. They differ between versions."""
_SAFETY_S = 5.0
"""How much later gRPC's own deadline is. The server enforces the request's deadline and reports the phase in
which it passed; gRPC's deadline is only a safety net."""


class Connection:
    """A server's address with gRPC's channel options and error translation. Raises InvalidArgument for a
    wrong address or token.

    Args:
        grpc_module: `grpc` or `grpc.aio`.
    """

    def __init__(self, grpc_module: Any, address: str, token: str | None, tls: bool | Tls) -> None:
        check_address(address)
        self.metadata = _metadata(token)
        self.closed = False
        self._address, self._answered = address, False
        files = Tls.from_environment() if tls is True else tls
        self.channel = (
            grpc_module.secure_channel(address, files.credentials(), CHANNEL)
            if files
            else grpc_module.insecure_channel(address, CHANNEL)
        )

    def answered(self) -> None:
        """Record that a Deltafront server has answered at this address."""
        self._answered = True

    def translate(self, error: Any) -> DeltafrontError:
        """Translate a gRPC error into a DeltafrontError."""
        if self.closed:
            return Cancelled("the client was closed")
        details, metadata = error.details() or "", error.trailing_metadata() or ()
        translated = from_status(error.code(), details, metadata)
        if not self._answered and not is_ours(metadata) and (wrong := wrong_endpoint(self._address, details)):
            return wrong
        if not isinstance(translated, ConnectionLost):
            self._answered = True
        elif not self._answered and any(words in details.lower() for words in _UNREACHABLE):
            hint = " (does it speak TLS?)" if "socket closed" in details.lower() else ""
            return Unavailable(f"{self._address} cannot be reached{hint}: {details}")
        return translated


def _metadata(token: str | None) -> list[tuple[str, str]]:
    token = os.environ.get("DELTAFRONT_TOKEN") if token is None else token
    if token and not (token.isascii() and token.isprintable()):
        raise InvalidArgument("token", "must be printable ASCII, as a header is")
    return [("authorization", f"Bearer {token}")] if token else []


def rpc_timeout(deadline: float | None) -> float | None:
    """Return gRPC's timeout in seconds. deadline: the request's, in seconds since the epoch."""
    return None if deadline is None else max(deadline - time.time(), 0.0) + _SAFETY_S
