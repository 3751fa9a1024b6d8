"""Reads protobuf messages without decoding them, because each field takes more memory than its bytes."""

from __future__ import annotations

import contextlib
from typing import Any

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_GROUPS = (3, 4)
_SEARCHED_FIELDS = 64


def has_more_fields(data: bytes, descriptor: Any, max_fields: int) -> bool:
    """Whether a message has more, with the messages in it. Raises ValueError for invalid protobuf."""
    messages: list[tuple[int, int, Any]] = [(0, len(data), descriptor)]
    count = 0
    while messages:
        at, end, message = messages.pop()
        while at < end:
            count += 1
            if count > max_fields:
                return True
            tag, at = _varint(data, at)
            wire = tag & 7
            if wire == _VARINT:
                _, at = _varint(data, at)
            elif wire == _BYTES:
                size, at = _varint(data, at)
                field = None if message is None else message.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    messages.append((at, at + size, field.message_type))
                at += size
            elif wire in (_FIXED32, _FIXED64):
                at += 4 if wire == _FIXED32 else 8
            elif wire not in _GROUPS:
                raise ValueError(f"no wire type {wire}")
        if at > end:
            raise ValueError("a field is longer than its message")
    return False


def text_of(data: bytes, number: int) -> str:
    """Find a text among a message's first fields; empty if there is none."""
    text, at = b"", 0
    with contextlib.suppress(ValueError):  # what was found before it stands
        for _ in range(_SEARCHED_FIELDS):
            if at >= len(data):
                break
            tag, at = _varint(data, at)
            wire, size = tag & 7, 0
            if wire == _BYTES:
                size, at = _varint(data, at)
                if tag >> 3 == number:
                    text = data[at : at + size]
            elif wire == _VARINT:
                _, at = _varint(data, at)
            at += size + {_FIXED32: 4, _FIXED64: 8}.get(wire, 0)
    try:
        return text.decode()
    except ValueError:
        return ""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number, and where it ends."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number does not end")
