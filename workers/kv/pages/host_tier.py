"""The prefix cache's tier in host memory.

A cached page is copied to host memory as soon as it becomes evictable, so that evicting it from the GPU later
needs no wait. If a request finds a page only in host memory, the page is copied back, layer by layer. The
slots in host memory have a second `PrefixCache`, which chooses the slots to evict. Only the event loop's
thread uses this module.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from deltafront.workers.kv.pages.eviction import CachedBlock
from deltafront.workers.kv.pages.host_states import HostStates, StateBack
from deltafront.workers.kv.pages.pool import PagePool, page_runs
from deltafront.workers.kv.pages.prefix_cache import PrefixCache
from deltafront.workers.messages.prompts import PromptKey
from deltafront.workers.messages.states import TierStats

BATCH_PAGES = 256
"""Maximum pages that one copy of all layers moves, since other copies wait meanwhile."""

Runs = Sequence[tuple[int, int, int]]
"""Consecutive pages and slots, each run as (first page, first slot, count)."""
Move = Callable[[Runs, range, bool], Awaitable[None]]
"""Runs `HostMemory.copy` on every rank."""


def least_gib(page_bytes: int, state_bytes: int, state_share: float) -> float:
    """Return the smallest possible `decode.host_cache_gib` besides 0: it holds a batch of pages and a state.
    Pure.

    Args:
        page_bytes, state_bytes: Bytes of a page and of a state, on all ranks.
        state_share: The share of the memory that states get.
    """
    pages = BATCH_PAGES * page_bytes / (1 - state_share)
    return max(pages, state_bytes / state_share if state_bytes else 0.0) / 2**30


class PagesBack:
    """One copy of KV from slots in host memory back into GPU pages, layer by layer, after a state.

    The pages are in the prefix cache from the start of the copy, so that other requests find them and wait
    for the same copy.

    Args:
        state: The state after these pages, if it comes back, too.

    Attributes:
        left: Number of layers still to copy. They are the model's last ones.
        error: The reason why the copy failed; empty if it has not.
    """

    def __init__(
        self,
        pages: Sequence[int],
        slots: Sequence[int],
        layers: int,
        began: float,
        state: StateBack | None = None,
    ) -> None:
        self.pages, self.slots, self.began, self.state = pages, slots, began, state
        self.runs: Runs = page_runs(pages, slots)
        self.left, self.error = layers, ""
        self._changed: list[Callable[[], None]] = []

    @property
    def over(self) -> bool:
        return not self.left or bool(self.error)

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` each time layers have been copied, and when the copy fails."""
        self._changed.append(changed)

    def record_layers(self, layers: int, error: str = "") -> None:
        """Record that further `layers` have been copied, or that the copy has failed."""
        self.left, self.error = self.left - layers, error
        for changed in self._changed:
            changed()


class HostTier:
    """The prefix cache's tier in host memory.

    Args:
        on_gpu: The prefix cache of the pages on the GPU.
        layers: Number of layers of the model.
        slots: Number of pages that fit into the host memory.
        states: The states in host memory; None if the model has none.
    """

    def __init__(
        self,
        on_gpu: PrefixCache,
        layers: int,
        slots: int,
        move: Move,
        clock: Callable[[], float],
        states: HostStates | None = None,
    ) -> None:
        self.pool = PagePool(slots, prefix_cache=PrefixCache(clock, above=on_gpu))
        self.too_late = 0
        """Number of blocks that were evicted from the GPU before they were copied."""
        self.on_kept: Callable[[Sequence[int]], None] = lambda _slots: None
        """Called with the slots of offered blocks that are now in host memory. The slots are pinned during
        the call."""
        self._back, self._back_s = 0, 0.0
        self._clock = clock
        self._on_gpu = on_gpu
        self._layers = layers
        self._move = move
        self.states = states
        self._coming: dict[int, PagesBack] = {}
        """The copy that fills each page."""
        self._coming_states: dict[int, PagesBack] = {}
        """The copy that fills each state slot."""
        self._asked: deque[PagesBack] = deque()
        self._ask = asyncio.Event()
        self._offered: deque[tuple[int, CachedBlock]] = deque()
        self._wake = asyncio.Event()
        on_gpu.on_evictable = self._offer

    def find(self, key: PromptKey, first: int) -> tuple[tuple[int, ...], bool]:
        """Return the slots of a prompt's longest cached prefix, from page `first` on, and whether all were
        prefilled densely."""
        return self.pool.prefix_cache.find(key, first)

    @property
    def busy(self) -> bool:
        """True while blocks or states wait to be copied to host memory."""
        return self._wake.is_set() or (self.states is not None and self.states.busy)

    async def run(self) -> None:
        """Copy offered blocks to host memory, until cancelled."""
        while True:
            await self._wake.wait()
            await self._keep(*self._next())
            if not self._offered:
                self._wake.clear()

    def bring_back(
        self, slots: Sequence[int], pages: Sequence[int], state: StateBack | None = None
    ) -> PagesBack:
        """Start to copy slots back into pages, after a state. The slots stay pinned until the copy ends."""
        coming = PagesBack(pages, slots, self._layers, self._clock(), state)
        self.pool.incref(slots)
        self._on_gpu.restore(pages, (self.pool.prefix_cache[slot] for slot in slots))
        self._coming |= dict.fromkeys(pages, coming)
        if state is not None and self.states is not None:
            self.states.hold(state)
            self._coming_states[state.target] = coming
        self._asked.append(coming)
        self._ask.set()
        return coming

    def coming_to(self, pages: Sequence[int], state: int | None = None) -> tuple[PagesBack, ...]:
        """Return the running copies that fill any of these pages or this state slot."""
        found = [self._coming[page] for page in pages if page in self._coming] if self._coming else []
        if state is not None and state in self._coming_states:
            found.append(self._coming_states[state])
        return tuple(dict.fromkeys(found))

    async def run_back(self) -> None:
        """Run the copies back into pages until cancelled. Several copies take turns."""
        try:
            while True:
                await self._ask.wait()
                await self._move_back(self._asked.popleft())
                if not self._asked:
                    self._ask.clear()
        finally:
            for coming in {*self._coming.values(), *self._coming_states.values()}:
                self._end_back(coming, 0, "the decode worker is shutting down")

    async def _move_back(self, coming: PagesBack) -> None:
        count = min(coming.left, max(1, BATCH_PAGES * self._layers // max(1, len(coming.pages))))
        first = self._layers - coming.left
        try:
            if not first and coming.state is not None and self.states is not None:
                await self.states.bring_back(coming.state)
            await self._move(coming.runs, range(first, first + count), True)
        except Exception as error:
            self._end_back(coming, 0, str(error))
            return
        if count == coming.left:
            self._back += len(coming.pages)
            self._back_s += self._clock() - coming.began
            self._end_back(coming, count)
        else:
            self._asked.append(coming)
            coming.record_layers(count)

    def _end_back(self, coming: PagesBack, count: int, error: str = "") -> None:
        for page in coming.pages:
            del self._coming[page]
        if coming.state is not None and self.states is not None:
            del self._coming_states[coming.state.target]
            self.states.end(coming.state, failed=bool(error))
        if error:
            self._on_gpu.drop(coming.pages)
        coming.record_layers(count, error)
        # Release the slots later: a prompt has thousands, and requests that waited should continue first.
        asyncio.get_running_loop().call_soon(self.pool.release, coming.slots)

    def stats(self, bytes_per_page: int) -> TierStats:
        cache = self.pool.prefix_cache
        return TierStats(
            tier="host",
            room=self.pool.total,
            pages=len(cache),
            bytes_per_page=bytes_per_page,
            evicted=cache.evicted,
            evicted_retained=cache.evicted_retained,
            evicted_age_s=cache.evicted_age_s,
            missed=self.too_late,
            back=self._back,
            back_s=self._back_s,
            states_evicted=0 if self.states is None else self.states.slots.evicted,
        )

    def _offer(self, pages: Sequence[int]) -> None:
        self._offered.extend((page, self._on_gpu[page]) for page in pages)
        self._wake.set()

    def _next(self) -> tuple[list[tuple[int, CachedBlock]], list[int]]:
        """Take up to BATCH_PAGES offered blocks from the queue. Both lists are in the order of eviction.

        Returns:
            The blocks to copy to host memory, with their pages; and the slots of the blocks that are already
                there, each with a new reference. Blocks that the GPU has evicted are skipped.
        """
        new: list[tuple[int, CachedBlock]] = []
        known: list[int] = []
        cache = self.pool.prefix_cache
        for _ in range(min(BATCH_PAGES, len(self._offered))):
            page, block = self._offered.popleft()
            slot = cache.page_of(block.name)
            if slot is not None:
                known.append(slot)
                if (held := cache[slot]) is not block:
                    held.until = max(held.until, block.until)
                    held.used, held.interval = block.used, block.interval
                self._settle(page, block)
            elif self._on_gpu.get(page) is block:
                new.append((page, block))
            else:
                self.too_late += 1
        self.pool.incref(known)
        return new, known

    def _settle(self, page: int, block: CachedBlock) -> None:
        if self._on_gpu.get(page) is block:
            self._on_gpu.settle([page])

    async def _keep(self, new: Sequence[tuple[int, CachedBlock]], known: Sequence[int]) -> None:
        # If too few slots are free or evictable, only the first pages of prompts are copied.
        batch = new[max(0, len(new) - self.pool.free) :][::-1]
        slots = self.pool.allocate(len(batch))
        try:
            if batch:
                runs = page_runs([page for page, _ in batch], slots)
                await self._move(runs, range(self._layers), False)
            for (page, block), slot in zip(batch, slots, strict=True):
                if self._on_gpu.get(page) is block:  # else the page may have been overwritten during the copy
                    self.pool.prefix_cache.restore([slot], [block])
                else:
                    self.too_late += 1
            for page, block in new[::-1]:
                self._settle(page, block)
            self.on_kept([*slots, *known])
        finally:
            self.pool.release(slots)
            self.pool.release(known[::-1])
