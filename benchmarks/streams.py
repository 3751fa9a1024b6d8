"""Reads the event streams of a client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def ending(events: Iterable[object], kind: type[T]) -> T:
    """Read a stream and return its final event, of type `kind`. Raises RuntimeError without one."""
    for event in events:
        if isinstance(event, kind):
            return event
    raise RuntimeError(f"the stream ended without {kind.__name__}")
