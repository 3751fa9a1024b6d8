"""How many fields a message has on the wire, before it is decoded: each takes more memory than its bytes."""

from __future__ import annotations

from typing import Any

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_GROUPS = (3, 4)
_FIRST = 64


def has_more_fields(data: bytes, kind: Any, most: int) -> bool:
    """Whether a message has more than `most` fields, with those of the messages in it. kind: its descriptor.
    Raises ValueError for what is no such message."""
    parts: list[tuple[int, int, Any]] = [(0, len(data), kind)]
    count = 0
    while parts:
        at, end, known = parts.pop()
        while at < end:
            count += 1
            if count > most:
                return True
            tag, at = _varint(data, at)
            wire = tag & 7
            if wire == _VARINT:
                _, at = _varint(data, at)
            elif wire == _BYTES:
                size, at = _varint(data, at)
                field = None if known is None else known.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    parts.append((at, at + size, field.message_type))
                at += size
            elif wire in (_FIXED32, _FIXED64):
                at += 4 if wire == _FIXED32 else 8
            elif wire not in _GROUPS:
                raise ValueError(f"no wire type {wire}")
        if at > end:
            raise ValueError("a field is longer than its message")
    return False


def text_of(data: bytes, number: int) -> str:
    """A field of a message, where it is among the first; empty if it is not, or is no text."""
    text, at = b"", 0
    try:
        for _ in range(_FIRST):
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
        return text.decode()
    except ValueError:
        return ""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number does not end")
