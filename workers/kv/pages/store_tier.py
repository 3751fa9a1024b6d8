"""The prefix cache's tier on disk: files of consecutive pages, which outlive the worker.

A file holds a group: `GROUP_PAGES` pages of a prompt, starting at a multiple of `GROUP_PAGES`. The group has
the name and the retention of its last page. It is saved once all of its pages are in host memory, and loaded
into host memory when a prompt needs pages that are only on disk. A `PrefixCache` of groups chooses which to
evict. Only the event loop's thread uses this module.

A state whose block ends a group has a file beside the group's, and leaves with it. A prompt continues from
the last group with a state.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from deltafront.workers.kv.pages.eviction import CachedBlock
from deltafront.workers.kv.pages.host_states import HostStates
from deltafront.workers.kv.pages.host_tier import HostTier
from deltafront.workers.kv.pages.pool import OutOfPages
from deltafront.workers.kv.pages.prefix_cache import PrefixCache
from deltafront.workers.messages.prompts import LINK_BYTES, PromptKey
from deltafront.workers.messages.states import TierStats

GROUP_PAGES = 16
AT_ONCE = 8
"""Maximum number of groups of one prompt that are loaded at the same time."""

_STATE = b"state"
"""The suffix of a state's name, after its group's name."""

Stored = Callable[[str, bytes, Sequence[int], int], Awaitable[None]]
"""Runs `HostMemory.stored` on every rank: `save`, `load` or `remove` of a group or state by name. Raises
StoreError."""

Date = Callable[[Sequence[tuple[bytes, float]]], None]
"""Sets groups' dates, as `KVFiles.date` does, so that a later worker knows when they were used."""
_APART_S = 0.001
"""Seconds between the dates of a prompt's groups, so that a later worker, too, evicts the last group
first."""

log = logging.getLogger(__name__)


class StoreError(Exception):
    """A group's file cannot be used, or has changed since it was saved."""


@dataclass
class _Loading:
    """A group of pages that is being loaded from disk into host memory.

    `slots` are the group's slots in host memory, with one reference for each of the `wanted` callers. They
    are empty if the file cannot be used or host memory is full.
    """

    slots: asyncio.Future[Sequence[int]]
    wanted: int = 1


class StoreTier:
    """The prefix cache's tier on disk, below the `HostTier`.

    Args:
        saved: The page groups and states found on disk, from `KVFiles.saved`.
        room: Maximum number of page groups.
        clock: Returns seconds: the clock that `HostTier` has.
        state_groups: The size of a state in page groups, rounded up.
    """

    def __init__(
        self,
        host: HostTier,
        stored: Stored,
        date: Date,
        saved: Iterable[tuple[bytes, float]],
        room: int,
        clock: Callable[[], float],
        state_groups: int = 0,
    ) -> None:
        self._clock = clock
        self._back, self._back_s = 0, 0.0
        self._states, self._state_groups = host.states, state_groups
        self._with_state: set[bytes] = set()
        """The names of groups with a state on disk."""
        self.lost = 0
        """Number of groups that could not be saved or loaded."""
        self._host, self._stored, self._date, self._room = host, stored, date, room
        self._groups = PrefixCache(clock, learns=False)
        """The groups on disk. Each has a number in place of a page."""
        self._names: dict[int, bytes] = {}
        self._numbers = itertools.count()
        self._offered: list[CachedBlock] = []
        self._undated: list[tuple[bytes, float]] = []
        self._loading: dict[bytes, _Loading] = {}
        self._wake = asyncio.Event()
        for name, retain_s in saved:
            if name.endswith(_STATE):
                self._with_state.add(name.removesuffix(_STATE))
            else:
                self._groups.unpin([self._hold(name, retain_s)])
        self._orphans = [name for name in self._with_state if self._groups.page_of(name) is None]
        self._with_state -= {*self._orphans}
        if self._orphans:
            self._wake.set()
        host.on_kept = self._offer

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def busy(self) -> bool:
        """True while groups wait to be saved."""
        return self._wake.is_set()

    def find(self, key: PromptKey, first: int) -> tuple[list[bytes], bool]:
        """Find the groups on disk that hold a prompt's pages from page `first` on. If the model has states,
        the last of them has one, before the prompt's last token.

        Returns:
            The names of the first groups, limited to what fits into host memory, and whether all of them were
            prefilled densely.
        """
        names: list[bytes] = []
        pages = len(key.chain) // LINK_BYTES - (self._states is not None and not key.tail)
        for group in range(first // GROUP_PAGES, pages // GROUP_PAGES):
            named = self._names_at(key, (group + 1) * GROUP_PAGES)
            name = next((one for one in named if self._groups.page_of(one) is not None), b"")
            if not name or (len(names) + 1) * GROUP_PAGES > self._host.pool.total:
                break
            names.append(name)
        while names and self._states is not None and not self._has_state(names[-1], self._states):
            names.pop()
        return names, all(name.startswith(key.exact_root) for name in names)

    def _names_at(self, key: PromptKey, pages: int) -> list[bytes]:
        """Return the names that the group which ends after this many of a prompt's pages may have."""
        link = key.chain[(pages - 1) * LINK_BYTES : pages * LINK_BYTES]
        return [root + link for root in (key.root, key.exact_root)]

    def _has_state(self, name: bytes, states: HostStates) -> bool:
        return name in self._with_state or states.has(name)

    async def load(self, key: PromptKey, on_gpu: int, pages: int) -> tuple[list[int], int]:
        """Load a prompt's pages `on_gpu` .. `pages`-1 and the state after them into host memory, except what
        is already there.

        If another request is loading a group, wait for it. Only the worker's shutdown cancels a load.

        Returns:
            The prompt's slots in host memory, each with one reference to release, and the number of pages
                that were loaded without a gap.
        """
        held = list(self._host.find(key, on_gpu)[0])
        self._host.pool.incref(held)
        first, began = on_gpu + len(held), self._clock()
        names, _exact = self.find(key, first)
        last = -(-pages // GROUP_PAGES) - first // GROUP_PAGES
        numbered = list(enumerate(names[: max(0, last)], start=first // GROUP_PAGES))
        free = asyncio.Semaphore(AT_ONCE)
        loaded = await asyncio.gather(*(self._load(free, key, *group) for group in numbered))
        self._use([name for name, slots in zip(names, loaded, strict=False) if slots])
        for name in self._names_at(key, pages):
            await self._load_state(name)
        held += [slot for slots in loaded for slot in slots]
        in_a_row = sum(len(slots) for slots in takewhile(bool, loaded))
        brought = max(0, min(in_a_row - first % GROUP_PAGES, pages - first))
        self._back += brought
        self._back_s += self._clock() - began if brought else 0.0
        return held, brought

    async def _load(self, free: asyncio.Semaphore, key: PromptKey, group: int, name: bytes) -> Sequence[int]:
        loading = self._loading.get(name)
        if loading is not None:
            loading.wanted += 1
            return await asyncio.shield(loading.slots)
        slots: Sequence[int] = self._slots_of(name)
        if len(slots) == GROUP_PAGES:  # already in host memory, although an earlier page may be missing
            self._host.pool.incref(slots)
            return slots
        loading = self._loading[name] = _Loading(asyncio.get_running_loop().create_future())
        try:
            slots = await self._read(free, key, group, name)
        except BaseException as error:
            loading.slots.set_exception(error)
            loading.slots.exception()  # else asyncio warns if no other request waits
            raise
        finally:
            del self._loading[name]
        for _ in range(loading.wanted - 1):
            self._host.pool.incref(slots)
        loading.slots.set_result(slots)
        return slots

    async def _read(self, free: asyncio.Semaphore, key: PromptKey, group: int, name: bytes) -> Sequence[int]:
        pool = self._host.pool
        async with free:
            try:
                slots = pool.allocate(GROUP_PAGES)
            except OutOfPages:
                return ()
            try:
                await self._stored("load", name, slots, 0)
            except StoreError as error:
                log.warning("cached KV is prefilled again: %s", error)
                pool.release(slots)
                await self._forget(name)
                return ()
            except BaseException:
                pool.release(slots)
                raise
        root, start = name[:-LINK_BYTES], group * GROUP_PAGES
        pool.prefix_cache.add(root, key.chain, (0,) * start + slots, self._retain_s(name), start)
        return slots

    async def _load_state(self, name: bytes) -> None:
        """Load a group's state into host memory, if it is on disk and nowhere else and a slot is free."""
        states = self._states
        if states is None or name not in self._with_state or states.has(name) or not states.slots.free:
            return
        (slot,) = states.slots.take(1)
        try:
            await self._stored("load", name + _STATE, (), slot)
            states.slots.cache(name, slot)
        except StoreError as error:
            self.lost += 1
            log.warning("a cached state is computed again: %s", error)
            await self._remove_state(name)
        finally:
            states.slots.release([slot])

    async def run(self) -> None:
        """Save offered groups, and update the dates of used groups, until cancelled."""
        while True:
            await self._wake.wait()
            while self._orphans:  # their groups' files were removed by another worker
                await self._remove_state(self._orphans.pop())
            while self._offered or self._undated:
                offered = sorted(self._offered, key=lambda block: block.place)
                self._offered = []
                for block in offered:
                    await self._save(block)
                    await self._save_state(block.name)
                self._use([block.name for block in offered])
                await self._date_used()
            self._wake.clear()

    def _offer(self, slots: Sequence[int]) -> None:
        blocks = (self._host.pool.prefix_cache.get(slot) for slot in slots)
        ends = [one for one in blocks if one is not None and one.place % GROUP_PAGES == GROUP_PAGES - 1]
        if ends:
            self._offered += ends
            self._wake.set()

    async def _save(self, block: CachedBlock) -> None:
        retain_s = block.until - self._clock()
        if self._groups.page_of(block.name) is not None:
            self._hold(block.name, retain_s)
            return
        slots, pool = self._slots_of(block.name), self._host.pool
        if len(slots) < GROUP_PAGES:
            return
        pool.incref(slots)  # now, since the slots could be evicted while room is made on disk
        try:
            if not await self._make_room(1):
                return
            await self._stored("save", block.name, slots, 0)
        except StoreError as error:
            self.lost += 1
            log.warning("KV is not saved: %s", error)
            return
        finally:
            pool.release(slots)
        self._hold(block.name, retain_s)

    async def _save_state(self, name: bytes) -> None:
        """Save the state of a group on disk, if host memory has one."""
        states, number = self._states, self._groups.page_of(name)
        if states is None or number is None or name in self._with_state:
            return
        if 1 + self._state_groups > self._room:  # else all groups would be evicted for nothing
            return
        if (slot := states.slots.find(name)) is None:
            return
        self._groups.pin([number])  # else it could be evicted for its own state
        states.slots.incref(slot)
        try:
            if await self._make_room(self._state_groups):
                await self._stored("save", name + _STATE, (), slot)
                self._with_state.add(name)
        except StoreError as error:
            self.lost += 1
            log.warning("a state is not saved: %s", error)
        finally:
            states.slots.release([slot])
            self._groups.unpin([number])

    @property
    def _used(self) -> int:
        return len(self._groups) + len(self._with_state) * self._state_groups

    async def _make_room(self, groups: int) -> bool:
        while self._used + groups > self._room and self._groups.evictable:
            (number,) = self._groups.evict(1)
            await self._remove(self._names.pop(number))
        return self._used + groups <= self._room

    def _hold(self, name: bytes, retain_s: float) -> int:
        """Add a group if it is new, retain it for `retain_s`, and pin it. Returns the group's number."""
        number = self._groups.page_of(name)
        if number is None:
            number, now = next(self._numbers), self._clock()
            self._names[number] = name
            self._groups.restore([number], [CachedBlock(name, now, 0, b"")])
        self._groups.pin([number])
        self._groups.retain([number], retain_s)
        return number

    def _use(self, names: Sequence[bytes]) -> None:
        """Mark a prompt's groups as just used. The last group is evicted before the first."""
        held = [self._hold(name, 0.0) for name in names if self._groups.page_of(name) is not None]
        self._groups.unpin(held[::-1])
        used = (self._names[number] for number in held)
        self._undated += [(name, self._retain_s(name) - n * _APART_S) for n, name in enumerate(used)]
        self._wake.set()

    async def _date_used(self) -> None:
        dates, self._undated = self._undated, []
        try:
            await asyncio.to_thread(self._date, dates)
        except StoreError as error:
            log.warning("a later worker will not know when KV was used: %s", error)

    def _retain_s(self, name: bytes) -> float:
        number = self._groups.page_of(name)
        block = None if number is None else self._groups.get(number)
        return 0.0 if block is None else max(0.0, block.until - self._clock())

    def seconds(self, pages: int) -> float:
        """Estimate the seconds to load `pages` pages; 0 before the first load."""
        return pages * self._back_s / self._back if self._back else 0.0

    def stats(self, bytes_per_page: int) -> TierStats:
        return TierStats(
            tier="disk",
            room=self._room * GROUP_PAGES,
            pages=len(self) * GROUP_PAGES,
            bytes_per_page=bytes_per_page,
            evicted=self._groups.evicted * GROUP_PAGES,
            evicted_retained=self._groups.evicted_retained * GROUP_PAGES,
            evicted_age_s=self._groups.evicted_age_s * GROUP_PAGES,
            missed=self.lost * GROUP_PAGES,
            back=self._back,
            back_s=self._back_s,
        )

    def _slots_of(self, name: bytes) -> list[int]:
        """Return the host-memory slots of a group's last pages, back to the first page that has none."""
        slots: list[int] = []
        while name and len(slots) < GROUP_PAGES:
            slot = self._host.pool.prefix_cache.page_of(name)
            if slot is None:
                break
            slots.append(slot)
            name = self._host.pool.prefix_cache[slot].before
        return slots[::-1]

    async def _forget(self, name: bytes) -> None:
        self.lost += 1
        number = self._groups.page_of(name)
        if number is not None:
            self._groups.pin([number])
            self._groups.drop([number])
            del self._names[number]
        await self._remove(name)

    async def _remove(self, name: bytes) -> None:
        if name in self._with_state:
            await self._remove_state(name)
        await self._remove_file(name)

    async def _remove_state(self, name: bytes) -> None:
        self._with_state.discard(name)
        await self._remove_file(name + _STATE)

    async def _remove_file(self, name: bytes) -> None:
        try:
            await self._stored("remove", name, (), 0)
        except StoreError as error:
            log.warning("KV stays on disk: %s", error)
