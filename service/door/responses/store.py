"""Stores answered conversations in a door's memory, so that a later request can continue one by its id."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltafront.service.door.json_body import NamedNotFound
from deltafront.service.errors import shown

KEPT_S = 3600.0
"""How long a response is stored. The time is the same for all, so the oldest one always expires first."""
_ID = re.compile(r"resp_[0-9a-f]{32}")


class UnknownResponse(NamedNotFound):
    param, openai_code = "previous_response_id", "previous_response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"Previous response with id {shown(response_id)} not found: it was not stored, is older than an "
            "hour, had to go for newer ones, or its door is gone. Send the conversation as input"
        )
        self.response_id = response_id


def is_response_id(text: str) -> bool:
    return bool(_ID.fullmatch(text))


Message = Mapping[str, Any]
Elsewhere = Callable[[str, str, bool], Awaitable["StoredResponse | None"]]
"""Asks other doors for a response by its id and owner. The last argument: whether to forget it there."""


async def nowhere_else(_response_id: str, _owner: str, _drop: bool) -> StoredResponse | None:
    return None


@dataclass
class StoredResponse:
    """A conversation up to a response, which is None until it is complete. `size`: bytes of both, without
    regard to data shared with other responses."""

    owner: str
    messages: Sequence[Message]
    expires: float
    size: int
    response: Mapping[str, Any] | None = None


@dataclass
class _Owned:
    """One caller's responses in a store, the oldest first, and their total bytes."""

    ids: OrderedDict[str, None] = field(default_factory=OrderedDict)
    size: int = 0


class ResponseStore:
    """Stores conversations of at most `max_bytes` in all. Evicts the oldest of the caller who has the most.
    Thread-safe.

    A conversation is stored before its answer begins, so that running requests also count towards
    `max_bytes`.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._owners: dict[str, _Owned] = {}
        self._lock = threading.Lock()
        self.size = 0

    def begin(self, response_id: str, owner: str, messages: Sequence[Message]) -> bool:
        """Store a conversation before its response. Returns False if it is larger than the store."""
        size = size_of(messages)
        with self._lock:
            if size > self._max_bytes:
                return False
            entry = StoredResponse(owner, messages, self._clock() + KEPT_S, 0)
            self._entries[response_id] = entry
            self._owners.setdefault(owner, _Owned()).ids[response_id] = None
            self._grow(entry, size)
        return True

    def complete(self, response_id: str, response: Mapping[str, Any], messages: Sequence[Message]) -> None:
        """Add a response and its messages, unless its conversation has been evicted."""
        size = size_of(response) + size_of(messages)
        with self._lock:
            if (entry := self._entries.get(response_id)) is not None:
                entry.response, entry.messages = response, [*entry.messages, *messages]
                self._grow(entry, size)

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return a complete response of this caller. Raises UnknownResponse."""
        with self._lock:
            self._evict()
            entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner or entry.response is None:
            raise UnknownResponse(response_id)
        return entry

    def take(self, response_id: str, owner: str, drop: bool) -> StoredResponse | None:
        """Return a complete response of this caller, and delete it if `drop`. Returns None if it is not
        stored here."""
        try:
            found = self.get(response_id, owner)
        except UnknownResponse:
            return None
        if drop:
            self.drop(response_id)
        return found

    def drop(self, response_id: str) -> None:
        with self._lock:
            self._remove(response_id)

    def _grow(self, entry: StoredResponse, size: int) -> None:
        entry.size += size
        self._owners[entry.owner].size += size
        self.size += size
        self._evict()

    def _remove(self, response_id: str) -> None:
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return
        owned = self._owners[entry.owner]
        del owned.ids[response_id]
        owned.size -= entry.size
        self.size -= entry.size
        if not owned.ids:
            del self._owners[entry.owner]

    def _evict(self) -> None:
        """Evict conversations that are too old or exceed the bound."""
        now = self._clock()
        while self._entries and next(iter(self._entries.values())).expires <= now:
            self._remove(next(iter(self._entries)))
        while self.size > self._max_bytes:
            largest = max(self._owners.values(), key=lambda owned: owned.size)
            self._remove(next(iter(largest.ids)))


def size_of(value: object) -> int:
    """Return the bytes of JSON data in memory."""
    if isinstance(value, Mapping):
        return sys.getsizeof(value) + sum(size_of(key) + size_of(inner) for key, inner in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return sys.getsizeof(value) + sum(map(size_of, value))
    return sys.getsizeof(value)
