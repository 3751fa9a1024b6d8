"""KV hand-off between GPUs of one host: a decode worker copies KV from the stage's pages into its own.

A stage announces KV only after the GPU has computed it, because a CUDA stream that waits for another
process's event hangs if that process dies. The stage may reuse its pages once the decode worker has answered
or died, or at the time `until`. Both processes read the same clock, and the worker drops KV that it has
copied after `until`.
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

from deltafront.workers.kv.cache import PagedKVCache, Sides
from deltafront.workers.kv.handoff.exported_pages import (
    ExportedCache,
    ExportedKV,
    PageExport,
    Runs,
    checked,
    moved_bytes,
    too_late,
)
from deltafront.workers.kv.handoff.outbox import MAX_UNANSWERED_BYTES, ActorOutbox
from deltafront.workers.kv.handoff.protocols import HandoffError, UsePages, described, plain
from deltafront.workers.kv.handoff.stream import MessageSender
from deltafront.workers.kv.peer_memory import CudaPeerMemory, PeerMemory
from deltafront.workers.messages.stages import KVAnnouncement
from deltafront.workers.settings import HandoffConfig

MESSAGE_BYTES = 256 << 20
"""Messages are large, because on a shared GPU the copies for each message stop the stage's kernels for 0.2
ms. The last message takes 0.7 ms to arrive."""


@dataclass(frozen=True)
class MappedCache(ExportedCache):
    """Describes the KV cache of the stage in process `pid`.

    Attributes:
        name: A unique name.
        sides: Handles of the cache's tensors for `PeerMemory.open`.
    """

    name: str
    home: str
    pid: int
    sides: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True)
class MappedKV(ExportedKV):
    """The payload of an announcement. The KV may be copied until `until`, in seconds of the host's monotonic
    clock."""

    cache: MappedCache
    until: float


class CudaIpcExporter:
    """Describes a stage's pages, so that decode workers on the same host can copy from them
    (`stream.KVExporter`)."""

    message_bytes = MESSAGE_BYTES
    in_place = True

    def __init__(
        self,
        cache: PagedKVCache,
        peers: PeerMemory,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._peers = cache, peers
        self._lease_s, self._clock = lease_s, clock
        self._exported = MappedCache(
            layers=cache.layers,
            shape=tuple(cache.k_LPSGD.shape),
            dtype=str(cache.dtype),
            name=secrets.token_hex(8),
            home=peers.home,
            pid=os.getpid(),
            sides=tuple(map(peers.export, cache.sides)),
        )

    def export(self, pages: Sequence[int]) -> CudaIpcExport:
        return CudaIpcExport(self._cache, pages, self._peers.mark, self._describe)

    def _describe(self, rows: Runs) -> MappedKV:
        return MappedKV(self._exported, rows, self._clock() + self._lease_s)


class CudaIpcExport(PageExport):
    """Describes one request's KV (`stream.KVExport`). `describe` makes the payload from a chunk's cache
    rows."""

    def __init__(
        self,
        cache: PagedKVCache,
        pages: Sequence[int],
        mark: Callable[[], Any],
        describe: Callable[[Runs], MappedKV],
    ) -> None:
        super().__init__(cache, pages, mark)
        self._describe = describe

    def payload(self, layers: Sequence[Runs]) -> MappedKV:
        return self._describe(layers[0])

    def revoke(self) -> bool:
        """Return True: the decode worker drops KV that it copies after `until`."""
        return True


class CudaIpcReader:
    """Copies KV from stages' caches. It keeps a cache mapped until the stage's process ends."""

    def __init__(
        self,
        cache: PagedKVCache,
        thread: Executor,
        peers: PeerMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._thread, self._peers, self._clock = cache, thread, peers, clock
        self._mapped: dict[str, Sides] = {}

    async def read(
        self, announcement: KVAnnouncement, layers: Sequence[int], use_pages: UsePages
    ) -> int | None:
        kv = self._checked(announcement)
        loop = asyncio.get_running_loop()
        with use_pages() as pages:
            if pages is None:
                return None
            sides = await loop.run_in_executor(self._thread, self._map, announcement, kv.cache)
            if kv.cache.name not in self._mapped:
                self._mapped[kv.cache.name] = sides
                self._peers.when_gone(kv.cache.pid, lambda: self._unmap(kv.cache.name))
            await loop.run_in_executor(self._thread, self._pull, announcement, kv, sides, layers, pages)
        return moved_bytes(announcement, layers, self._cache)

    def _checked(self, announcement: KVAnnouncement) -> MappedKV:
        kv = checked(announcement, self._cache, MappedKV)
        if kv.cache.home != self._peers.home:
            raise HandoffError(
                f"{described(announcement)} lies on another host or in another container ({kv.cache.home}; "
                f"here: {self._peers.home}), where handoff.transport: cuda_ipc cannot read: use nixl or "
                "object_store"
            )
        return kv

    def _map(self, announcement: KVAnnouncement, exported: MappedCache) -> Sides:
        known = self._mapped.get(exported.name)
        if known is not None:
            return known
        try:
            return tuple(map(self._peers.open, exported.sides))
        except RuntimeError as error:
            raise HandoffError(f"{described(announcement)} cannot be reached: {plain(error)}") from error

    def _unmap(self, name: str) -> None:
        self._mapped.pop(name, None)

    def _pull(
        self,
        announcement: KVAnnouncement,
        kv: MappedKV,
        sides: Sides,
        layers: Sequence[int],
        pages: Sequence[int],
    ) -> None:
        start, heads, theirs = announcement.start, self._cache.heads, kv.cache.layers
        for first, count in kv.rows:
            parts = {}
            for layer in layers:
                rows = (side[theirs.index(layer)].flatten(0, 1)[first : first + count] for side in sides)
                parts[layer] = tuple(side_T[:, heads] for side_T in rows)
            self._cache.write_layers(pages, start, parts)
            start += count
        if self._clock() >= kv.until:
            raise too_late(announcement)


def sender(config: HandoffConfig, cache: PagedKVCache) -> MessageSender:
    exporter = CudaIpcExporter(cache, CudaPeerMemory(cache.device), config.ack_timeout_s)
    outbox = ActorOutbox(MAX_UNANSWERED_BYTES, config.ack_timeout_s)
    return MessageSender(exporter, outbox, background=True)


def reader(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> CudaIpcReader:
    return CudaIpcReader(cache, thread, CudaPeerMemory(cache.device))
