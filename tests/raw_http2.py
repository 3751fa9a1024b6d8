"""A minimal HTTP/2 client, for streams that a gRPC client would not begin, and for many cheap streams."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4

Header = tuple[bytes, bytes]


def message(content: bytes) -> bytes:
    """Frame a message like gRPC."""
    return b"\0" + struct.pack(">I", len(content)) + content


class Http2:
    """A connection to `address` (host:port), from `source`, an address of this machine."""

    def __init__(self, address: str, source: str = "127.0.0.1", timeout_s: float = 60.0) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout_s, (source, 0))
        self._stream = -1
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))

    def call(self, path: str, headers: Sequence[Header] = (), body: bytes = b"", ends: bool = False) -> int:
        """Begin a gRPC call, and return the stream's number. ends: the client sends nothing more."""
        self._stream += 2
        every = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"x"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            *headers,
        ]
        head = b"".join(b"\0" + _text(name) + _text(value) for name, value in every)
        frames = _frame(_HEADERS, _END_HEADERS, self._stream, head)
        if body or ends:
            frames += _frame(_DATA, _END_STREAM if ends else 0, self._stream, body)
        self.socket.sendall(frames)
        return self._stream

    def answered(self) -> bytes:
        """Return all data that has arrived or arrives at once."""
        self.socket.setblocking(False)
        got = bytearray()
        with contextlib.suppress(BlockingIOError):
            while more := self.socket.recv(1 << 16):
                got += more
        self.socket.setblocking(True)
        return bytes(got)

    def close(self) -> None:
        self.socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _text(value: bytes) -> bytes:
    """Encode a HPACK string without Huffman coding."""
    if len(value) < 127:
        return bytes((len(value),)) + value
    rest, size = len(value) - 127, bytearray((127,))
    while rest >= 128:
        size.append(rest % 128 | 128)
        rest //= 128
    return bytes(size) + bytes((rest,)) + value
