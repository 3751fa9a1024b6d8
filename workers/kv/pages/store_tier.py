"""The tier of remembered pages on disk: groups of pages in a row, which outlive the worker.

A group is `GROUP_PAGES` pages of a prompt, from a multiple of that on, and has its last page's name. It is
saved from host memory once all of it is there, and comes back there when a prompt is found on disk alone.
Accounting on the event loop's thread.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import takewhile

from ...messages.prompts import LINK_BYTES, PromptKey
from ...messages.states import TierStats
from .entries import Entry
from .host_tier import HostTier
from .pool import OutOfPages

GROUP_PAGES = 16
AT_ONCE = 8
"""Groups that are loaded together."""

Stored = Callable[[str, bytes, Sequence[int]], Awaitable[None]]
"""`save`, `load` or `remove` of a group, with its slots, on every rank. Raises StoreError."""

log = logging.getLogger(__name__)


class StoreError(Exception):
    """A group is not there, or not as it was saved."""


class StoreTier:
    """names: of the groups that are there, the least recently used first. room: the most groups."""

    def __init__(
        self,
        host: HostTier,
        stored: Stored,
        names: Iterable[bytes],
        room: int,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._evicted, self._evicted_age_s = 0, 0.0
        self._back, self._back_s = 0, 0.0
        self.lost = 0
        """Groups that could not be saved, or not be loaded."""
        self._host, self._stored, self._room = host, stored, room
        now = clock()
        self._groups: OrderedDict[bytes, float] = OrderedDict((name, now) for name in names)
        """When each was last used, the least recently used first."""
        self._offered: deque[bytes] = deque()
        self._wake = asyncio.Event()
        host.on_kept = self._offer

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def busy(self) -> bool:
        """Whether something is to be saved, or being saved."""
        return self._wake.is_set()

    def find(self, key: PromptKey, first: int) -> tuple[list[bytes], bool]:
        """Return the groups that hold a prompt's pages from page `first` on, as far as host memory has room
        for them, and whether dense attention made all of them."""
        names: list[bytes] = []
        for group in range(first // GROUP_PAGES, len(key.chain) // (LINK_BYTES * GROUP_PAGES)):
            end = (group + 1) * GROUP_PAGES * LINK_BYTES
            link = key.chain[end - LINK_BYTES : end]
            name = next(
                (root + link for root in (key.root, key.exact_root) if root + link in self._groups), b""
            )
            if not name or (len(names) + 1) * GROUP_PAGES > self._host.pool.total:
                break
            names.append(name)
        return names, all(name.startswith(key.exact_root) for name in names)

    async def load(self, key: PromptKey, on_gpu: int, pages: int) -> tuple[list[int], int]:
        """Load a prompt's first `pages` pages into host memory, as far as they are there and neither in host
        memory nor among the first `on_gpu`.

        Returns: slots of all that is in host memory then, held, and how many pages of the prompt were loaded.
        """
        held = list(self._host.find(key, on_gpu)[0])
        self._host.pool.retain(held)
        first, began = on_gpu + len(held), self._clock()
        names, _exact = self.find(key, first)
        last = -(-pages // GROUP_PAGES) - first // GROUP_PAGES
        numbered = list(enumerate(names[: max(0, last)], start=first // GROUP_PAGES))
        free = asyncio.Semaphore(AT_ONCE)
        loaded = await asyncio.gather(*(self._load(free, key, *group) for group in numbered))
        held += [slot for slots in loaded for slot in slots]
        in_a_row = sum(len(slots) for slots in takewhile(bool, loaded))
        brought = max(0, min(in_a_row - first % GROUP_PAGES, pages - first))
        self._back += brought
        self._back_s += self._clock() - began if brought else 0.0
        return held, brought

    async def _load(self, free: asyncio.Semaphore, key: PromptKey, group: int, name: bytes) -> Sequence[int]:
        pool = self._host.pool
        async with free:
            try:
                slots = pool.allocate(GROUP_PAGES)
            except OutOfPages:
                return ()
            try:
                await self._stored("load", name, slots)
            except StoreError as error:
                log.warning("remembered K/V is read again: %s", error)
                pool.release(slots)
                await self._forget(name)
                return ()
            except BaseException:
                pool.release(slots)
                raise
        self._use(name)
        root, start = name[:-LINK_BYTES], group * GROUP_PAGES
        pool.entries.add(root, key.chain, (0,) * start + slots, 0.0, start)
        return slots

    async def run(self) -> None:
        """Save what is offered, until cancelled."""
        while True:
            await self._wake.wait()
            while self._offered:
                await self._save(self._offered.popleft())
            self._wake.clear()

    def _offer(self, slots: Sequence[int]) -> None:
        entries = (self._host.pool.entries.get(slot) for slot in slots)
        ends = [one.name for one in entries if one is not None and one.place % GROUP_PAGES == GROUP_PAGES - 1]
        for name in ends:
            if name in self._groups:
                self._use(name)
            else:
                self._offered.append(name)
                self._wake.set()

    async def _save(self, name: bytes) -> None:
        slots = self._slots_of(name)
        if name in self._groups or len(slots) < GROUP_PAGES:
            return
        pool = self._host.pool
        pool.retain(slots)
        try:
            await self._stored("save", name, slots)
        except StoreError as error:
            self.lost += 1
            log.warning("K/V is not saved: %s", error)
            return
        finally:
            pool.release(slots)
        self._use(name)
        while len(self._groups) > self._room:
            oldest, used = self._groups.popitem(last=False)
            self._evicted += 1
            self._evicted_age_s += self._clock() - used
            await self._remove(oldest)

    def seconds(self, pages: int) -> float:
        """Return how long so many pages take to come back; 0 while nothing has."""
        return pages * self._back_s / self._back if self._back else 0.0

    def _use(self, name: bytes) -> None:
        self._groups[name] = self._clock()
        self._groups.move_to_end(name)

    def stats(self, bytes_per_page: int) -> TierStats:
        return TierStats(
            tier="disk",
            room=self._room * GROUP_PAGES,
            pages=len(self) * GROUP_PAGES,
            bytes_per_page=bytes_per_page,
            evicted=self._evicted * GROUP_PAGES,
            evicted_age_s=self._evicted_age_s * GROUP_PAGES,
            missed=self.lost * GROUP_PAGES,
            back=self._back,
            back_s=self._back_s,
        )

    def _slots_of(self, name: bytes) -> list[int]:
        """Return the slots of a group, as far back from its last page as they are in host memory."""
        slots: list[int] = []
        while name and len(slots) < GROUP_PAGES:
            slot = self._host.pool.entries.page_of(name)
            if slot is None:
                break
            slots.append(slot)
            entry: Entry | None = self._host.pool.entries.get(slot)
            assert entry is not None
            name = entry.before
        return slots[::-1]

    async def _forget(self, name: bytes) -> None:
        self.lost += 1
        self._groups.pop(name, None)
        await self._remove(name)

    async def _remove(self, name: bytes) -> None:
        try:
            await self._stored("remove", name, ())
        except StoreError as error:
            log.warning("K/V stays on disk: %s", error)
