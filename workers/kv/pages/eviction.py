"""The eviction order of cached blocks: the block whose next use is expected last is evicted first.

Each block learns its usual reuse interval (`interval`) from its cache hits. Its next use is expected one
interval after its last use. A block that is overdue or was never reused, and has been unused for t seconds,
is expected in t more seconds; among such blocks the order is LRU. The time to the expected use is divided by
a weight that grows with the block's prefill cost, so costly blocks stay longer. Pure; times are seconds of
one clock.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass

RISE, FALL = 0.7, 0.25
"""An absence longer (RISE) or shorter (FALL) than a block's `interval` moves it by this share of the
difference. It thus stays above the mean, since a block that is evicted shortly before its next use is a loss.
"""
DOUBLES_PAGES = 2048
"""A page at this index in its prompt costs twice as much prefill as the first page: its attention takes as
long as all else. It is 32,768 tokens, measured with Llama-3.1-8B."""
CLASSES = 6
"""Number of cost classes. Blocks whose prefill costs are within a factor of two share a class."""
WEIGHT = 1.5
"""The time until a block's next use is divided by this for each doubling of its cost. With 2, only saved
seconds of prefill would count, and short chats beside long sessions lose; with 1, only hit tokens."""
REMEMBERED_PAGES = 32
"""`Pasts` remembers an evicted page only if its index in the prompt is a multiple of this."""
PASTS = 16_384


@dataclass(slots=True)
class CachedBlock:
    """A cached block. All tiers that hold its KV share this object.

    Attributes:
        name: The prompt's prefix-cache root and the page's link in the hash chain (`messages.prompts`).
        until: The time at which its retention ends.
        place: The page's index in the prompt.
        before: The name of the previous page; empty for the first.
        used: The time at which its last request ended; infinite before its first request has ended.
        interval: Seconds after which it is usually used again; 0: not known.
    """

    name: bytes
    until: float
    place: int
    before: bytes
    used: float = math.inf
    interval: float = 0.0

    def returned(self, now: float) -> None:
        """Update `interval` from the time since the last use, when the block is used again."""
        absence = now - self.used
        if not self.interval:
            self.interval = max(0.0, absence)
        elif absence > 0.0:
            self.interval += (RISE if absence > self.interval else FALL) * (absence - self.interval)

    @property
    def cost_class(self) -> int:
        return min(CLASSES, (1 + self.place // DOUBLES_PAGES).bit_length()) - 1

    def ranks_as(self, other: CachedBlock) -> bool:
        """Return True if this block and `other` have the same place in the eviction order."""
        alike = self.used == other.used and self.interval == other.interval
        return alike and self.cost_class == other.cost_class


class Pasts:
    """Remembers `used` and `interval` of the last `PASTS` evicted blocks that were given to `keep`.

    A conversation that was evicted whole thus gets its interval back when it returns.
    """

    def __init__(self) -> None:
        self._pasts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def keep(self, block: CachedBlock) -> None:
        self._pasts[block.name] = (block.used, block.interval)
        self._pasts.move_to_end(block.name)
        if len(self._pasts) > PASTS:
            self._pasts.popitem(last=False)

    def take(self, name: bytes) -> tuple[float, float] | None:
        """Return `used` and `interval` of the block of this name, and forget it."""
        return self._pasts.pop(name, None)


class EvictionOrder:
    """Pages that may be evicted, in heaps by eviction order. Every operation takes O(log n), amortised."""

    def __init__(self) -> None:
        self._blocks: dict[int, CachedBlock] = {}
        self._last_expected = [_Heap() for _ in range(CLASSES)]
        self._least_recent = [_Heap() for _ in range(CLASSES)]
        self._due = _Heap()

    def add(self, page: int, block: CachedBlock) -> None:
        self._blocks[page] = block
        if block.interval:
            due = block.used + block.interval
            self._last_expected[block.cost_class].push(-due, page)
            self._due.push(due, page)
        else:
            self._least_recent[block.cost_class].push(block.used, page)

    def discard(self, page: int) -> None:
        block = self._blocks.pop(page, None)
        if block is not None:
            self._last_expected[block.cost_class].discard(page)
            self._least_recent[block.cost_class].discard(page)
            self._due.discard(page)

    def pop(self, now: float) -> int | None:
        """Remove the first page to evict, and return it; None if there is no candidate."""
        while (due := self._due.first) is not None and due[0] <= now:
            self._is_overdue(due[1])
        first = max(self._firsts(now), default=None, key=lambda one: one[0])
        if first is None:
            return None
        self.discard(first[1])
        return first[1]

    def _is_overdue(self, page: int) -> None:
        block = self._blocks[page]
        self._due.discard(page)
        self._last_expected[block.cost_class].discard(page)
        self._least_recent[block.cost_class].push(block.used, page)

    def _firsts(self, now: float) -> list[tuple[float, int]]:
        """Return the first page of each heap, after the weighted seconds until its expected next use."""
        aged = [(WEIGHT**n, one.first) for n, one in enumerate(self._least_recent)]
        expected = [(WEIGHT**n, one.first) for n, one in enumerate(self._last_expected)]
        return [
            *(((now - one[0]) / weight, one[1]) for weight, one in aged if one is not None),
            *(((-one[0] - now) / weight, one[1]) for weight, one in expected if one is not None),
        ]


class _Heap:
    """A min-heap of pages by key; among equal keys, the page pushed first comes first.

    `discard` only marks an entry. It is removed when it reaches the top, or when the heap is rebuilt.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, int]] = []
        self._number_of: dict[int, int] = {}
        self._pushed = 0

    def push(self, key: float, page: int) -> None:
        self._pushed += 1
        self._number_of[page] = self._pushed
        heapq.heappush(self._entries, (key, self._pushed, page))
        if len(self._entries) > 2 * len(self._number_of) + 16:
            self._entries = [one for one in self._entries if self._number_of.get(one[2]) == one[1]]
            heapq.heapify(self._entries)

    def discard(self, page: int) -> None:
        self._number_of.pop(page, None)

    @property
    def first(self) -> tuple[float, int] | None:
        while self._entries and self._number_of.get(self._entries[0][2]) != self._entries[0][1]:
            heapq.heappop(self._entries)
        return (self._entries[0][0], self._entries[0][2]) if self._entries else None
