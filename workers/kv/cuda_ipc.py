"""The hand-off between GPUs of one host: a decode worker copies from the stage's pages into its own.

A stage announces where in its cache a chunk's K/V lies once that is computed, so nobody ever waits on
another process's events (a stream that does hangs for good if the process dies first). Copy engines do the
rest. The stage gives a request's pages away when the decode worker has answered all announcements, or has
died, or the time it was given is over; the worker looks at the same clock (one host, one clock) and takes
nothing that it read later than that.

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
from .page_pool import row_runs
from .peer_memory import CudaPeerMemory, PeerMemory
from .posting import PostingSender

MESSAGE_BYTES = 256 << 20
"""Where a decode worker shares a GPU with a stage, the stage's kernels stop for each message's copies, some
0.2 ms: so there are few, and the last one is there 0.7 ms after it is told of."""


@dataclass(frozen=True)
class LentCache:
    """A stage's cache, as another process finds it. name: its own, for ever. home, pid: of its process.
    layers: those it holds."""

    name: str
    home: str
    pid: int
    layers: range
    shape: tuple[int, ...]
    dtype: str
    k: Any = field(repr=False)
    v: Any = field(repr=False)


@dataclass(frozen=True)
class LentKV:
    """The payload. rows: (first, count) of the cache's rows [P × S], in the order of the chunk's tokens.
    until: seconds of the host's monotonic clock."""

    cache: LentCache
    rows: tuple[tuple[int, int], ...]
    until: float


class Lender:
    """A `posting.Packer`: a message says where K/V lies, and how long it stays."""

    message_bytes = MESSAGE_BYTES
    lends = True

    def __init__(
        self,
        cache: PagedKVCache,
        peers: PeerMemory,
        hold_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._peers = cache, peers
        self._hold_s, self._clock = hold_s, clock
        self._lent = LentCache(
            secrets.token_hex(8),
            peers.home,
            os.getpid(),
            cache.layers,
            tuple(cache.k_LPSGD.shape),
            str(cache.dtype),
            peers.export(cache.k_LPSGD),
            peers.export(cache.v_LPSGD),
        )

    def keep(
        self, start: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor, pages: Sequence[int]
    ) -> tuple[tuple[tuple[int, int], ...], Any]:
        rows = row_runs(pages, start, k_TGD.shape[0], self._cache.page_tokens)
        return rows, self._peers.mark()

    def payload(self, kept: Sequence[tuple[tuple[int, int], ...]]) -> LentKV:
        return LentKV(self._lent, kept[0], self._clock() + self._hold_s)


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
            if self._mapped.setdefault(kv.cache.name, sides) is sides:
                self._peers.when_gone(kv.cache.pid, lambda: self._unmap(kv.cache.name))
            await loop.run_in_executor(self._thread, self._pull, announcement, kv, sides, layers, pages)
        cache = self._cache
        row_bytes = 2 * cache.kv_heads * cache.head_dim * cache.dtype.itemsize
        return announcement.tokens * len(layers) * row_bytes

    def release(self, request_id: str) -> None:
        """Nothing is kept: the stage hears that K/V was taken from the answer to its announcement."""

    def _checked(self, announcement: KVAnnouncement) -> LentKV:
        """Raises HandoffError for what cannot be read from here."""
        kv, cache, what = announcement.payload, self._cache, described(announcement)
        if not isinstance(kv, LentKV):
            raise HandoffError(f"{what} is {type(kv).__name__}, not pages of a stage's cache")
        lent = kv.cache
        if lent.home != self._peers.home:
            raise HandoffError(
                f"{what} lies on another host or in another container ({lent.home}; here: "
                f"{self._peers.home}), where handoff.transport: cuda_ipc cannot read: use object_store"
            )
        wanted = (cache.page_tokens, cache.kv_heads, cache.head_dim), str(cache.dtype)
        if (lent.shape[2:], lent.dtype) != wanted:
            raise HandoffError(
                f"{what} is in pages of {lent.shape[2:]} {lent.dtype}, expected {wanted[0]} {wanted[1]}; "
                "prefill and decode workers must run the same model in the same dtype"
            )
        last = announcement.layer + announcement.layers - 1
        rows = sum(count for _, count in kv.rows)
        if announcement.layer not in lent.layers or last not in lent.layers or rows != announcement.tokens:
            raise HandoffError(f"{what} is not what the stage holds: {lent.layers}, {rows} rows")
        return kv

    def _map(self, announcement: KVAnnouncement, lent: LentCache) -> tuple[torch.Tensor, torch.Tensor]:
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
        kv: LentKV,
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
            raise HandoffError(f"{described(announcement)} was read too late: its stage no longer kept it")


def sender(config: HandoffConfig, cache: PagedKVCache, sink: Sink | None) -> PostingSender:
    """Raises ValueError for a cache on a CPU."""
    lender = Lender(cache, CudaPeerMemory(cache.device), config.ack_timeout_s)
    post = ActorPost(config.max_unanswered_bytes, config.ack_timeout_s)
    return PostingSender(lender, post, background=True)


def receiver(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> CudaIpcReceiver:
    """Raises ValueError for a cache on a CPU."""
    return CudaIpcReceiver(cache, thread, CudaPeerMemory(cache.device))
