"""KV offloading: a decode worker's prefix cache in host memory and on disk.

If a reservation needs KV from disk, the worker answers once the KV is in host memory. The KV is then copied
into the request's pages layer by layer. A layer's attention waits for that layer's copy
(`RequestPages.come`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from deltafront.workers.decode.request_table import DecodeRequests
from deltafront.workers.kv.host_memory import RanksMemory
from deltafront.workers.kv.pages.host_states import HostStates
from deltafront.workers.kv.pages.host_tier import HostTier
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, PagePool
from deltafront.workers.kv.pages.store_tier import GROUP_PAGES, StoreTier
from deltafront.workers.messages.events import Prefix
from deltafront.workers.messages.prompts import PromptKey
from deltafront.workers.messages.requests import DecodeFailed, Refused, Reservation, Reserved
from deltafront.workers.messages.states import TierStats

T = TypeVar("T")
_Loading = asyncio.Task[tuple[list[int], int]]


class KeptTasks:
    """Background tasks that continue when their callers are cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks, including those started meanwhile, and wait for their end."""
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Tiers:
    """The tiers to which a worker's prefix cache is offloaded: host memory, then disk.

    Args:
        memory: The host memory of all ranks.
        room: Maximum number of pages on disk.
        in_place: True if prefill stages access the worker's own pages (transport `mapped`).
    """

    def __init__(
        self,
        requests: DecodeRequests,
        memory: RanksMemory,
        room: int,
        clock: Callable[[], float],
        *,
        in_place: bool = False,
    ) -> None:
        self._requests, self._memory, self._in_place = requests, memory, in_place
        slots, self._states = requests.manager.states, None
        if slots is not None:
            self._states = HostStates(slots, memory.state_slots, memory.move_state)
        sizes = requests.layers, memory.slots
        self.host = HostTier(requests.prefix_cache, *sizes, memory.move, clock, self._states)
        self.store: StoreTier | None = None
        if memory.files is not None:
            groups = max(1, room // GROUP_PAGES)
            files = memory.files
            state_groups = -(-memory.state_bytes // (memory.page_bytes * GROUP_PAGES))
            found = files.saved()
            self.store = StoreTier(self.host, memory.stored, files.date, found, groups, clock, state_groups)
        requests.manager.host = self.host
        self.under_way = KeptTasks()
        self._loading: set[str] = set()
        """Ids of requests whose prefix is being loaded from disk. `cancel` removes an id."""

    def runs(self) -> list[Coroutine[Any, Any, None]]:
        """Return the background loops that copy pages and states to and from host memory, and save pages to
        disk."""
        others = (self._states, self.store)
        return [self.host.run(), self.host.run_back(), *(one.run() for one in others if one is not None)]

    async def close(self) -> None:
        await self.under_way.cancel()
        self._memory.close()

    def stats(self) -> tuple[TierStats, ...]:
        tiers = (self.host, self.store)
        return tuple(tier.stats(self._memory.page_bytes) for tier in tiers if tier is not None)

    def find(self, key: PromptKey) -> Prefix | None:
        """Find a prompt's longest cached prefix. It may begin on the GPU and continue in host memory and on
        disk."""
        if self.store is None:
            return self._requests.manager.prefix(key)
        prefix = self._requests.manager.prefix(key) or Prefix(tokens=0, has_state=self._states is not None)
        near = prefix.tokens // PAGE_TOKENS
        groups, exact = self.store.find(key, near)
        if groups:
            on_disk = len(groups) * GROUP_PAGES - near % GROUP_PAGES
            tokens = (near + on_disk) * PAGE_TOKENS
            prefix = replace(
                prefix,
                tokens=tokens,
                exact=prefix.exact and exact,
                disk_tokens=on_disk * PAGE_TOKENS,
                disk_s=self.store.seconds(on_disk),
                group_tokens=tokens if prefix.has_state else 0,  # a group of pages is whole blocks
            )
        return prefix if prefix.tokens else None

    async def reserve(self, reservation: Reservation) -> Reserved | Refused:
        """Load a request's prefix from disk into host memory, then reserve its pages.

        If prefill stages access the pages directly, also wait until the KV of all layers is in the pages.
        Otherwise the stages would wait for it, and with them every request of their group.

        Raises:
            DecodeFailed: The request was cancelled while it waited, or a copy failed.
        """
        loaded, loaded_tokens = await self._load(reservation)
        try:
            reserved = await self._requests.reserve(reservation)
        finally:
            self.host.pool.release(loaded)
        if isinstance(reserved, Reserved):
            if self._in_place and not reservation.reads:
                await self._come(reservation.request_id)
            on_disk = min(loaded_tokens, reserved.host_tokens)
            reserved = replace(reserved, host_tokens=reserved.host_tokens - on_disk, disk_tokens=on_disk)
        return reserved

    def cancel(self, request_id: str) -> None:
        """Prevent a request whose prefix is still being loaded from disk from reserving pages."""
        self._loading.discard(request_id)

    async def _load(self, reservation: Reservation) -> tuple[list[int], int]:
        """Load a reservation's prefix from disk into host memory.

        Returns:
            The slots of host memory, each with one reference to release, and the number of loaded tokens.
        """
        request_id, key = reservation.request_id, reservation.key
        if self.store is None or key is None or not reservation.prefix_tokens:
            return [], 0
        on_gpu, in_host, _exact = self._requests.manager.find(key)
        pages = reservation.prefix_tokens // PAGE_TOKENS
        if len(on_gpu) + len(in_host) >= pages:
            return [], 0
        loading = self.under_way.begin(self.store.load(key, len(on_gpu), pages))
        self._loading.add(request_id)
        try:
            slots, loaded = await asyncio.shield(loading)
        except asyncio.CancelledError:
            self.cancel(request_id)
            self.under_way.begin(_release_loaded(loading, self.host.pool))
            raise
        if request_id not in self._loading:
            self.host.pool.release(slots)
            raise DecodeFailed("cancelled")
        self.cancel(request_id)
        return slots, loaded * PAGE_TOKENS

    async def _come(self, request_id: str) -> None:
        request = self._requests.find(request_id)
        if request is None:
            return
        try:
            await request.pages.come()
        except DecodeFailed:
            self._requests.forget(request)
            raise


async def _release_loaded(loading: _Loading, pool: PagePool) -> None:
    pool.release((await loading)[0])
