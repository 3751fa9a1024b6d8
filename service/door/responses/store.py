"""Keeps answered conversations in a door's memory, so that the next request can go on by an id."""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltafront.service.door.json_body import NamedNotFound
from deltafront.service.errors import shown

KEPT_S = 3600.0
"""How long a response is kept. Each lives as long, so the oldest one always goes first."""


class UnknownResponse(NamedNotFound):
    param, openai_code = "previous_response_id", "previous_response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"Previous response with id {shown(response_id)} not found: it was not stored, is older than an "
            "hour, had to go for newer ones, or is at another door of this service. Send the conversation as "
            "input"
        )


@dataclass(frozen=True)
class StoredResponse:
    """A response with its conversation. `size`: bytes that both take, whatever they share with others."""

    owner: str
    response: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...] = ()
    size: int = 0


@dataclass
class _Entry:
    stored: StoredResponse
    expires: float


class ResponseStore:
    """Stores responses of at most `max_bytes` together, and gives up the oldest first. Thread-safe."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self.size = 0

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, unless it is larger than the store."""
        with self._lock:
            if stored.size > self.max_bytes:
                return
            self._entries[response_id] = _Entry(stored, self._clock() + KEPT_S)
            self.size += stored.size
            self._evict()

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response of this caller. Raises UnknownResponse."""
        with self._lock:
            self._evict()
            entry = self._entries.get(response_id)
        if entry is None or entry.stored.owner != owner:
            raise UnknownResponse(response_id)
        return entry.stored

    def delete(self, response_id: str, owner: str) -> None:
        """Forget a response of this caller. Raises UnknownResponse."""
        self.get(response_id, owner)
        with self._lock:
            entry = self._entries.pop(response_id, None)
            self.size -= 0 if entry is None else entry.stored.size

    def _evict(self) -> None:
        """Give up what is too much or too old."""
        now = self._clock()
        while self._entries and (
            self.size > self.max_bytes or next(iter(self._entries.values())).expires <= now
        ):
            _, entry = self._entries.popitem(last=False)
            self.size -= entry.stored.size


def size_of(value: object) -> int:
    """Return the bytes of JSON data in memory."""
    if isinstance(value, Mapping):
        return sys.getsizeof(value) + sum(size_of(key) + size_of(inner) for key, inner in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return sys.getsizeof(value) + sum(map(size_of, value))
    return sys.getsizeof(value)
