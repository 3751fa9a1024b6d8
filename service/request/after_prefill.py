"""Learns how long a first token takes after its prompt's prefill. Pure."""

from __future__ import annotations

import statistics
from collections import deque

_KEPT = 16
"""Number of last requests whose median counts: a compiling kernel makes one slow."""


class AfterPrefill:
    """Seconds from the end of a prompt's prefill to its first token: the rest of the hand-off, recomputed
    blocks, and a decode step. They are learned for each number of recomputed blocks."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def record(self, blocks: int, seconds: float) -> None:
        self._seconds.setdefault(blocks, deque(maxlen=_KEPT)).append(seconds)

    def expected_s(self, blocks: int) -> float:
        """Return the median of the last requests; 0 if there was none."""
        known = self._seconds.get(blocks)
        return statistics.median(known) if known else 0.0
