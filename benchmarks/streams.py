"""Streams of events that a client gets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def ending(events: Iterable[object], kind: type[T]) -> T:
    """The event of this kind, which a stream ends with. Raises RuntimeError if it does not come."""
    for event in events:
        if isinstance(event, kind):
            return event
    raise RuntimeError(f"the stream ended without {kind.__name__}")
