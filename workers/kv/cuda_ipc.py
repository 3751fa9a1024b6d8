"""The hand-off between GPUs of one host: a decode worker copies from the stage's pages into its own.

A stage announces where in its cache a chunk's K/V lies once that is computed, so nobody ever waits on
another process's events (a stream that does hangs for good if the process dies first). Copy engines do the
rest where the worker's pages follow one another; into scattered ones a kernel writes. The stage gives a
request's pages away when the decode worker has answered all announcements, or has died, or the time it was
given is over; the worker looks at the same clock (one host, one clock) and takes nothing that it read later
than that.

Shape suffixes: L layers of a stage, P pages, S slots of a page, T tokens of a chunk, G key/value heads,
D head dimension.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import torch

from ..messages.stages import KVAnnouncement
from ..settings import HandoffConfig
from .actor_post import ActorPost, plain
from .cache import PagedKVCache
from .handoff import HandoffError, Hold, Sink, described
from .lending import Lender, LentCache, LentKV, Runs, checked, moved, too_late
from .peer_memory import CudaPeerMemory, PeerMemory
from .posting import PostingSender

MESSAGE_BYTES = 256 << 20
"""Where a decode worker shares a GPU with a stage, the stage's kernels stop for each message's copies, some
0.2 ms: so there are few, and the last one is there 0.7 ms after it is told of."""


@dataclass(frozen=True)
class MappedCache(LentCache):
    """name: its own, for ever. home, pid: of its process. k, v: handles that `PeerMemory.open` takes."""

    name: str
    home: str
    pid: int
    k: Any = field(repr=False)
    v: Any = field(repr=False)


@dataclass(frozen=True)
class MappedKV(LentKV):
    """The payload. until: seconds of the host's monotonic clock."""

    cache: MappedCache
    until: float


class CudaIpcLender(Lender):
    """A `posting.Packer`: a message says where K/V lies, and how long it stays."""

    message_bytes = MESSAGE_BYTES

    def __init__(
        self,
        cache: PagedKVCache,
        peers: PeerMemory,
        hold_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(cache, peers.mark)
        self._hold_s, self._clock = hold_s, clock
        self._lent = MappedCache(
            layers=cache.layers,
            shape=tuple(cache.k_LPSGD.shape),
            dtype=str(cache.dtype),
            name=secrets.token_hex(8),
            home=peers.home,
            pid=os.getpid(),
            k=peers.export(cache.k_LPSGD),
            v=peers.export(cache.v_LPSGD),
        )

    def payload(self, request_id: str, kept: Sequence[Runs]) -> MappedKV:
        return MappedKV(self._lent, kept[0], self._clock() + self._hold_s)

    def take_back(self, request_id: str) -> None:
        """The decode worker sees it from the clock."""


class CudaIpcReceiver:
    """Copies from stages' caches, which stay mapped while their processes live. Nothing else outlives
    `receive`."""

    def __init__(
        self,
        cache: PagedKVCache,
        thread: Executor,
        peers: PeerMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._thread, self._peers, self._clock = cache, thread, peers, clock
        self._mapped: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    async def receive(self, announcement: KVAnnouncement, layers: Sequence[int], hold: Hold) -> int:
        kv = self._checked(announcement)
        loop = asyncio.get_running_loop()
        with hold() as pages:
            if pages is None:
                return 0
            sides = await loop.run_in_executor(self._thread, self._map, announcement, kv.cache)
            if kv.cache.name not in self._mapped:
                self._mapped[kv.cache.name] = sides
                self._peers.when_gone(kv.cache.pid, lambda: self._unmap(kv.cache.name))
            await loop.run_in_executor(self._thread, self._pull, announcement, kv, sides, layers, pages)
        return moved(announcement, layers, self._cache)

    def release(self, request_id: str) -> None:
        """Nothing is kept: the stage hears that K/V was taken from the answer to its announcement."""

    def _checked(self, announcement: KVAnnouncement) -> MappedKV:
        """Raises HandoffError for what cannot be read from here."""
        kv = checked(announcement, self._cache, MappedKV)
        if kv.cache.home != self._peers.home:
            raise HandoffError(
                f"{described(announcement)} lies on another host or in another container ({kv.cache.home}; "
                f"here: {self._peers.home}), where handoff.transport: cuda_ipc cannot read: use nixl or "
                "object_store"
            )
        return kv

    def _map(self, announcement: KVAnnouncement, lent: MappedCache) -> tuple[torch.Tensor, torch.Tensor]:
        known = self._mapped.get(lent.name)
        if known is not None:
            return known
        try:
            return self._peers.open(lent.k), self._peers.open(lent.v)
        except RuntimeError as error:
            raise HandoffError(f"{described(announcement)} cannot be reached: {plain(error)}") from error

    def _unmap(self, name: str) -> None:
        """Its process has ended, and the next one needs the memory."""
        self._mapped.pop(name, None)

    def _pull(
        self,
        announcement: KVAnnouncement,
        kv: MappedKV,
        sides: tuple[torch.Tensor, torch.Tensor],
        layers: Sequence[int],
        pages: Sequence[int],
    ) -> None:
        """Write into the pages. Raises HandoffError if the stage may have given its own away meanwhile."""
        start = announcement.start
        for first, count in kv.rows:
            parts = {}
            for layer in layers:
                k_TGD, v_TGD = (
                    side[layer - kv.cache.layers.start].flatten(0, 1)[first : first + count] for side in sides
                )
                parts[layer] = k_TGD, v_TGD
            self._cache.write_layers(pages, start, parts)
            start += count
        if self._clock() >= kv.until:
            raise too_late(announcement)


def sender(config: HandoffConfig, cache: PagedKVCache, sink: Sink | None) -> PostingSender:
    """Raises ValueError for a cache on a CPU."""
    lender = CudaIpcLender(cache, CudaPeerMemory(cache.device), config.ack_timeout_s)
    post = ActorPost(config.max_unanswered_bytes, config.ack_timeout_s)
    return PostingSender(lender, post, background=True)


def receiver(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> CudaIpcReceiver:
    """Raises ValueError for a cache on a CPU."""
    return CudaIpcReceiver(cache, thread, CudaPeerMemory(cache.device))
