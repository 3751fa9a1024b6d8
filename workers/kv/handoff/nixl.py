"""KV hand-off across hosts: a decode worker reads KV from a stage's pages into its own pages by NIXL.

A stage registers its KV cache and announces the addresses of a chunk's KV. The decode worker posts READs,
which RDMA serves without the stage's process.

The two hosts have no common clock. With its pages a stage therefore exports a word of memory, the lease, and
clears it before another request gets the pages. The worker reads the lease after the KV: if the lease is
unchanged, the KV is valid.

NIXL cannot cancel a transfer. A worker therefore keeps its own pages allocated until the transfer is done, or
until the connection breaks because the stage has ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.handoff.exported_pages import (
    ExportedCache,
    ExportedKV,
    PageExport,
    Runs,
    checked,
    moved_bytes,
    too_late,
)
from deltafront.workers.kv.handoff.nixl_agent import (
    HOST,
    Agent,
    Memory,
    RegisteredWords,
    Span,
    memory_of,
    new_agent,
)
from deltafront.workers.kv.handoff.nixl_heads import (
    Gathered,
    GatherExporter,
    GatheringOutbox,
    GatherSlots,
    SlotLease,
    slot_bytes,
)
from deltafront.workers.kv.handoff.outbox import MAX_UNANSWERED_BYTES, ActorOutbox
from deltafront.workers.kv.handoff.protocols import HandoffError, UsePages, described, plain
from deltafront.workers.kv.handoff.stream import MessageSender
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, paired_runs, row_runs
from deltafront.workers.kv.peer_memory import launched
from deltafront.workers.messages.stages import KVAnnouncement
from deltafront.workers.settings import HandoffConfig

MESSAGE_BYTES = 64 << 20
"""A 400 Gb/s link transfers this in 1.3 ms."""
READS_AT_ONCE = 64
_POLL_S = 0.0005


@dataclass(frozen=True)
class RegisteredCache(ExportedCache):
    """Describes a stage's KV cache.

    Attributes:
        agent: The unique name of the stage's NIXL agent.
        metadata: The agent's NIXL metadata, which other agents need to connect.
        sides: Addresses of the cache's tensors in the stage's memory.
    """

    agent: str
    metadata: bytes = field(repr=False)
    memory: Memory
    sides: tuple[int, ...]


@dataclass(frozen=True)
class RegisteredKV(ExportedKV):
    """The payload of an announcement. The KV is valid while the word at `lease` in the stage's memory equals
    `serial`: the rows still belong to the request, or the slot of `gathered` still holds the message."""

    cache: RegisteredCache
    lease: Span
    serial: int
    gathered: Gathered | None = None


class NixlExporter:
    """Describes a stage's registered pages, so that decode workers can read them by NIXL
    (`stream.KVExporter`)."""

    message_bytes = MESSAGE_BYTES
    in_place = True

    def __init__(self, cache: PagedKVCache, agent: Agent) -> None:
        self._cache = cache
        self._agent = agent  # other processes can reach it only while it lives
        self._leases = RegisteredWords(agent, cache.pages)
        self._serials = itertools.count(1)
        _register(cache, agent)
        self._exported = _exported(cache, agent)

    def export(self, pages: Sequence[int]) -> NixlExport:
        return NixlExport(self._cache, pages, self._exported, self._leases, self._serials)


class NixlExport(PageExport):
    """Describes one request's KV (`stream.KVExport`). Each page has a lease word; a request uses the word of
    its first page."""

    def __init__(
        self,
        cache: PagedKVCache,
        pages: Sequence[int],
        exported: RegisteredCache,
        leases: RegisteredWords,
        serials: Iterator[int],
    ) -> None:
        super().__init__(cache, pages, partial(launched, cache.device))
        self._exported, self._leases, self._serials = exported, leases, serials
        self._leased = False

    def payload(self, layers: Sequence[Runs]) -> RegisteredKV:
        page = self._pages[0]
        if not self._leased:
            self._leases[page], self._leased = next(self._serials), True
        return RegisteredKV(self._exported, layers[0], self._leases.span(page), self._leases[page])

    def revoke(self) -> bool:
        if self._leased:
            self._leases[self._pages[0]], self._leased = 0, False
        return True


T = TypeVar("T")


class NixlReader:
    """Reads KV from stages' pages by NIXL (`KVReader`). Only `thread` calls the NIXL agent. It polls
    transfers, so that none blocks it."""

    def __init__(self, cache: PagedKVCache, thread: Executor, new: Callable[[], Agent]) -> None:
        self._cache, self._thread = cache, thread
        self._agent, self._leases_read = thread.submit(self._start, new).result()
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        """Indices of the words in `_leases_read` that no running transfer uses."""
        for slot in range(READS_AT_ONCE):
            self._slots.put_nowait(slot)
        self._reading: Counter[str] = Counter()
        """Number of running transfers from each stage's agent."""
        self._lost: set[str] = set()
        """Agents whose connection has failed. A new one is made once no transfer uses the old one."""

    async def read(
        self, announcement: KVAnnouncement, layers: Sequence[int], use_pages: UsePages
    ) -> int | None:
        kv = checked(announcement, self._cache, RegisteredKV)
        self._check_ranks(announcement, kv)
        slot = await self._slots.get()
        try:
            with use_pages() as pages:
                if pages is None:
                    return None
                ours = row_runs(pages, announcement.start, announcement.tokens)
                await self._read(announcement, kv, list(self._reads(announcement, kv, layers, ours)), slot)
            if self._leases_read[slot] != kv.serial:
                raise too_late(announcement)
        finally:
            self._slots.put_nowait(slot)
        return moved_bytes(announcement, layers, self._cache)

    async def _read(
        self, announcement: KVAnnouncement, kv: RegisteredKV, rows: list[tuple[int, int, int]], slot: int
    ) -> None:
        stage, memory = kv.cache.agent, memory_of(self._cache.device)
        lease = [(kv.lease[0], *self._leases_read.span(slot))]
        self._reading[stage] += 1
        try:
            await self._on_thread(self._reach, kv.cache)
            for theirs, ours, reads in ((kv.cache.memory, memory, rows), (HOST, HOST, lease)):
                handle = await self._on_thread(self._begin, stage, theirs, ours, reads)
                while not await self._on_thread(self._ended, handle):
                    await asyncio.sleep(_POLL_S)
        except Exception as error:
            self._lost.add(stage)
            raise HandoffError(f"{described(announcement)} could not be read: {plain(error)}") from error
        finally:
            self._reading[stage] -= 1
            if not self._reading[stage]:
                del self._reading[stage]
                if stage in self._lost:
                    await self._on_thread(self._disconnect, stage)

    def _check_ranks(self, announcement: KVAnnouncement, kv: RegisteredKV) -> None:
        cache, gathered = self._cache, kv.gathered
        ranks, theirs = cache.model_heads // cache.kv_heads, 1 if gathered is None else gathered.ranks
        if ranks != theirs:
            raise HandoffError(
                f"{described(announcement)} is for decode workers of {theirs} ranks, this one has {ranks}: "
                "prefill and decode workers must have one configuration"
            )
        size = announcement.layers, announcement.tokens
        if gathered is not None and (gathered.layers, gathered.tokens) != size:
            raise HandoffError(f"{described(announcement)} is not what the stage has gathered")

    def _reads(
        self, announcement: KVAnnouncement, kv: RegisteredKV, layers: Sequence[int], ours: Runs
    ) -> Iterator[tuple[int, int, int]]:
        """Yield each piece to copy: (address in the stage's memory, address in this memory, bytes)."""
        if kv.gathered is None:
            yield from self._reads_of_rows(kv, layers, ours)
            return
        cache = self._cache
        rank = cache.heads.start // cache.kv_heads
        for layer in layers:
            for side, ours_S in enumerate(cache.sides):
                target = ours_S[cache.layers.index(layer)].data_ptr()
                yield from kv.gathered.reads(rank, layer - announcement.layer, side, target, ours)

    def _reads_of_rows(
        self, kv: RegisteredKV, layers: Sequence[int], ours: Runs
    ) -> Iterator[tuple[int, int, int]]:
        cache, theirs = self._cache, kv.cache
        runs = list(paired_runs(kv.rows, ours))
        for layer in layers:
            their_start = theirs.layers.index(layer) * theirs.shape[1] * PAGE_TOKENS
            our_start = cache.layers.index(layer) * cache.pages * PAGE_TOKENS
            for source, target in zip(theirs.sides, cache.sides, strict=True):
                size = prod(target.shape[3:]) * target.itemsize
                for their_row, our_row, count in runs:
                    yield (
                        source + (their_start + their_row) * size,
                        target.data_ptr() + (our_start + our_row) * size,
                        count * size,
                    )

    # --- on the reader's thread ---------------------------------------------------------------------------

    async def _on_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _start(self, new: Callable[[], Agent]) -> tuple[Agent, RegisteredWords]:
        agent = new()
        _register(self._cache, agent)
        return agent, RegisteredWords(agent, READS_AT_ONCE)

    def _reach(self, stage: RegisteredCache) -> None:
        if stage.agent in self._lost:
            raise ConnectionError("the connection to its stage has failed")
        if not self._agent.check_remote_metadata(stage.agent):
            self._agent.add_remote_agent(stage.metadata)

    def _begin(self, stage: str, theirs: Memory, ours: Memory, reads: Sequence[tuple[int, int, int]]) -> Any:
        remote = theirs.descriptors(self._agent, [(source, size) for source, _, size in reads])
        local = ours.descriptors(self._agent, [(target, size) for _, target, size in reads])
        handle = self._agent.initialize_xfer("READ", local, remote, stage)
        self._agent.transfer(handle)  # `_ended` raises if it fails
        return handle

    def _ended(self, handle: Any) -> bool:
        state = "ERR"
        try:
            state = self._agent.check_xfer_state(handle)
        finally:
            if state != "PROC":
                self._agent.release_xfer_handle(handle)
        if state == "ERR":
            raise ConnectionError("NIXL's transfer has failed")
        return state == "DONE"

    def _disconnect(self, stage: str) -> None:
        self._lost.discard(stage)
        if self._agent.check_remote_metadata(stage):
            self._agent.remove_remote_agent(stage)


def _register(cache: PagedKVCache, agent: Agent) -> None:
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)  # else zeroing the cache could overwrite transferred KV
    spans = [(side.data_ptr(), side.nbytes) for side in cache.sides]
    memory_of(cache.device).register(agent, spans)


def _exported(cache: PagedKVCache, agent: Agent) -> RegisteredCache:
    return RegisteredCache(
        layers=cache.layers,
        shape=tuple(cache.k_LPSGD.shape),
        dtype=str(cache.dtype),
        agent=agent.name,
        metadata=agent.get_agent_metadata(),
        memory=memory_of(cache.device),
        sides=tuple(side.data_ptr() for side in cache.sides),
    )


def gathered_kv(cache: PagedKVCache, agent: Agent) -> Callable[[Gathered, SlotLease], RegisteredKV]:
    """Return a function that makes the payload of a message in a slot. Call `gathered_kv` only once all
    slots are registered, because it reads the agent's metadata."""
    exported = replace(_exported(cache, agent), sides=())
    return lambda gathered, lease: RegisteredKV(
        exported, ((0, gathered.tokens),), lease.span, lease.serial, gathered
    )


def rank_sender(config: HandoffConfig, cache: PagedKVCache, ranks: int, chunk_tokens: int) -> MessageSender:
    """Make a stage's sender for decode workers with `ranks` tensor-parallel ranks each."""
    agent = new_agent()
    slots = GatherSlots(cache, agent, ranks, slot_bytes(cache, chunk_tokens))
    outbox = GatheringOutbox(slots, gathered_kv(cache, agent), config.ack_timeout_s)
    return MessageSender(GatherExporter(cache.device), outbox, background=cache.device.type == "cuda")


def sender(config: HandoffConfig, cache: PagedKVCache) -> MessageSender:
    outbox = ActorOutbox(MAX_UNANSWERED_BYTES, config.ack_timeout_s)
    return MessageSender(NixlExporter(cache, new_agent()), outbox, background=cache.device.type == "cuda")


def reader(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> NixlReader:
    return NixlReader(cache, thread, new_agent)
