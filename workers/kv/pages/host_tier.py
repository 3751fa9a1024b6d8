"""The tier of remembered pages in host memory.

Each entry that nobody holds any more is copied to host memory at once, so that a page on the GPU can be given
up without waiting. What is found there alone is copied back into pages of the request that finds it. Host
memory gives up pages as the GPU does, by `Entries`. Accounting on the event loop's thread.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from ...messages.prompts import PromptKey
from ...messages.states import TierStats
from .entries import Entries, Entry
from .pool import PagePool

BATCH_PAGES = 256
"""Pages of a copy: another one waits for it."""

Move = Callable[[Sequence[int], Sequence[int], bool], Awaitable[None]]
"""`HostMemory.copy` on every rank."""


class HostTier:
    """on_gpu: the entries that are copied. slots: pages of host memory. clock: seconds."""

    def __init__(self, on_gpu: Entries, slots: int, move: Move, clock: Callable[[], float]) -> None:
        self.pool = PagePool(slots, entries=Entries(clock))
        self.too_late = 0
        """Entries that were given up on the GPU before they were copied."""
        self.on_kept: Callable[[Sequence[int]], None] = lambda _slots: None
        """Called with held slots that are here now, or were asked to be."""
        self._back, self._back_s = 0, 0.0
        self._clock = clock
        self._on_gpu = on_gpu
        self._move = move
        self._offered: deque[tuple[int, Entry]] = deque()
        self._wake = asyncio.Event()
        on_gpu.on_idle = self._offer

    def find(self, key: PromptKey, first: int) -> tuple[tuple[int, ...], bool]:
        """Return the slots of a prompt's pages from page `first` on, as `Entries.find` does."""
        return self.pool.entries.find(key, first)

    @property
    def busy(self) -> bool:
        """Whether something is to be copied, or being copied."""
        return self._wake.is_set()

    async def run(self) -> None:
        """Copy what is offered, until cancelled."""
        while True:
            await self._wake.wait()
            await self._keep(*self._next())
            if not self._offered:
                self._wake.clear()

    async def bring_back(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy held slots into pages in use."""
        began = self._clock()
        for start in range(0, len(slots), BATCH_PAGES):
            part = slice(start, start + BATCH_PAGES)
            await self._move(pages[part], slots[part], True)
        self._back += len(slots)
        self._back_s += self._clock() - began

    def stats(self, bytes_per_page: int) -> TierStats:
        entries = self.pool.entries
        return TierStats(
            tier="host",
            room=self.pool.total,
            pages=len(entries),
            bytes_per_page=bytes_per_page,
            evicted=entries.evicted,
            evicted_retained=entries.evicted_retained,
            evicted_age_s=entries.evicted_age_s,
            missed=self.too_late,
            back=self._back,
            back_s=self._back_s,
        )

    def _offer(self, pages: Sequence[int]) -> None:
        for page in pages:
            entry = self._on_gpu.get(page)
            assert entry is not None
            self._offered.append((page, entry))
        self._wake.set()

    def _next(self) -> tuple[list[tuple[int, Entry]], list[int]]:
        """Return entries to copy, and the slots of those that are here already, which are held meanwhile.
        Both are in the order in which they are given up."""
        new: list[tuple[int, Entry]] = []
        known: list[int] = []
        while self._offered and len(new) + len(known) < BATCH_PAGES:
            page, entry = self._offered.popleft()
            slot = self.pool.entries.page_of(entry.name)
            if slot is not None:
                self.pool.entries.retain([slot], entry.until - entry.used)
                known.append(slot)
            elif self._on_gpu.get(page) is entry:
                new.append((page, entry))
            else:
                self.too_late += 1
        self.pool.retain(known)
        return new, known

    async def _keep(self, new: Sequence[tuple[int, Entry]], known: Sequence[int]) -> None:
        # Slots that requests hold are not given up: then fewer are copied, a prompt's beginning first.
        batch = new[max(0, len(new) - self.pool.free) :][::-1]
        slots = self.pool.allocate(len(batch))
        try:
            if batch:
                await self._move([page for page, _ in batch], slots, False)
            for (page, entry), slot in zip(batch, slots, strict=True):
                if self._on_gpu.get(page) is entry:  # else its page may have been written to meanwhile
                    self.pool.entries.enter(slot, entry)
                else:
                    self.too_late += 1
            self.on_kept([*slots, *known])
        finally:
            self.pool.release(slots)
            self.pool.release(known[::-1])
