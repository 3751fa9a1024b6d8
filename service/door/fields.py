"""Inspects protobuf messages without decoding them, because a decoded field takes more memory than its
bytes.
"""

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

_VARINT, _BYTES = 0, 2
_SIZES = {1: 8, 3: 0, 4: 0, 5: 4}
"""The size in bytes of each wire type with a fixed size."""
_SEARCHED_FIELDS = 64


def has_more_fields(data: bytes, descriptor: Any, max_fields: int) -> bool:
    """Say whether a message, including nested ones, has more than `max_fields` fields. Raises ValueError for
    invalid protobuf."""
    messages: list[tuple[int, int, Any]] = [(0, len(data), descriptor)]
    count = 0
    while messages:
        begin, end, message = messages.pop()
        for number, wire, start, stop in _fields(data, begin, end):
            count += 1
            if count > max_fields:
                return True
            field = None if message is None else message.fields_by_number.get(number)
            if wire == _BYTES and field is not None and field.message_type is not None:
                messages.append((start, stop, field.message_type))
    return False


def text_of(data: bytes, number: int) -> str:
    """Find the text field `number` among a message's first fields; empty if it is not there."""
    text = b""
    with contextlib.suppress(ValueError):  # keep what was found before an error
        for found, wire, start, stop in islice(_fields(data, 0, len(data)), _SEARCHED_FIELDS):
            if found == number and wire == _BYTES:
                text = data[start:stop]
    try:
        return text.decode()
    except ValueError:
        return ""


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each field's number, wire type, and where its bytes begin and end. Raises ValueError."""
    while at < end:
        tag, at = _varint(data, at)
        wire, size = tag & 7, 0
        if wire == _VARINT:
            _, at = _varint(data, at)
        elif wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in _SIZES:
            size = _SIZES[wire]
        else:
            raise ValueError(f"no wire type {wire}")
        yield tag >> 3, wire, at, at + size
        at += size
    if at > end:
        raise ValueError("a field is longer than its message")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number does not end")
