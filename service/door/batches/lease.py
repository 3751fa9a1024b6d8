"""One door at a time works on batches: the one whose id the lease file has.

A door that wants to work writes its id and reads it again a turn later. If another door has written its own
id meanwhile, that one works (Fischer's algorithm). So the storage needs no locks. Clocks of machines are not
compared: a door watches for how long the file does not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from deltafront.service.door.batches.storage import Storage

TURN_S = 2.0
"""Seconds between two calls of `hold`."""
_VALID_S = 20.0
"""How long a door works without having renewed the lease."""
_EXPIRES_S = 30.0
"""How long the file is unchanged before another door takes over."""
_NAME = "lease"


class LeaseLost(Exception):
    """Another door works on batches, or the storage did not answer for too long."""


class DoorLease:
    """The lease of one door. door: its id, which no other process has."""

    def __init__(self, storage: Storage, door: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._me = f"{door} "
        self._clock = clock
        self._seen, self._since = "", 0.0
        self._writes = 0
        self._until = float("-inf")

    def check(self) -> None:
        """Raises LeaseLost unless this door may work."""
        if self._clock() >= self._until:
            raise LeaseLost

    def hold(self) -> bool:
        """Renew the lease, or claim it if it has expired. Returns whether this door may work."""
        now, found = self._clock(), self._read()
        if found.startswith(self._me):
            self._write()
            self._until = now + _VALID_S
            return True
        self._until = float("-inf")
        if found != self._seen:
            self._seen, self._since = found, now
        if not found or now - self._since >= _EXPIRES_S:
            self._write()
        return False

    def release(self) -> None:
        self._until = float("-inf")
        if self._read().startswith(self._me):
            self._storage.delete(_NAME)

    def _read(self) -> str:
        try:
            return self._storage.read(_NAME).decode()
        except FileNotFoundError:
            return ""

    def _write(self) -> None:
        self._writes += 1
        self._storage.write(_NAME, [f"{self._me}{self._writes}".encode()])
