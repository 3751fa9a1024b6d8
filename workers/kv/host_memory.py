"""Host memory for KV offloading: slots of one page or one state each, and copies between them and the GPU."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.kv_files import KVFiles
from deltafront.workers.kv.pages.host_states import state_share
from deltafront.workers.kv.pages.host_tier import BATCH_PAGES, Runs, least_gib
from deltafront.workers.kv.pages.pool import PAGE_TOKENS
from deltafront.workers.kv.pages.store_tier import AT_ONCE, StoreError
from deltafront.workers.kv.states import packed
from deltafront.workers.roles import Rank
from deltafront.workers.settings import DecodeConfig


class HostMemory:
    """One tensor-parallel rank's slots in host memory: [layers, slots, page_tokens, …] per tensor of its
    cache; and slots for states, if the model has some.

    The memory is pinned, so that a GPU's copy engines can access it. Pinning some tens of GiB takes seconds.
    `files` saves slots to disk; None: nothing is saved.
    """

    def __init__(
        self, cache: PagedKVCache, slots: int, files: KVFiles | None = None, state_slots: int = 0
    ) -> None:
        self._cache, self.slots, self.files, self.state_slots = cache, slots, files, state_slots
        self._rows = {layer: row for row, layer in enumerate(cache.layers)}
        own = () if cache.states is None else cache.states.slot(0)
        self._states = [_pinned((state_slots, *state_L.shape), state_L) for state_L in own]
        self.state_bytes = state_bytes(cache)
        self._threads = ThreadPoolExecutor(AT_ONCE, "decode-store")
        self.sides = [_pinned((len(side), slots, *side.shape[2:]), side) for side in cache.sides]

    @torch.inference_mode()
    def copy(self, runs: Runs, layers: range, back: bool) -> None:
        """Copy `layers` of pages to slots, or of slots to pages if `back`, and wait until that is complete.

        Each run takes one copy per layer and tensor, on the stream of received KV. Layers without pages are
        skipped.
        """
        with self._cache.moving():
            for row in (self._rows[layer] for layer in layers if layer in self._rows):
                for side, host in zip(self._cache.sides, self.sides, strict=True):
                    for page, slot, count in runs:
                        on_device = side[row, page : page + count]
                        on_host = host[row, slot : slot + count]
                        target, source = (on_device, on_host) if back else (on_host, on_device)
                        target.copy_(source, non_blocking=True)

    @torch.inference_mode()
    def copy_state(self, slot: int, kept: int, back: bool) -> None:
        """Copy the state in `slot` of the GPU to slot `kept` here (from 1 on), or from there if `back`, and
        wait until that is complete."""
        assert self._cache.states is not None
        with self._cache.moving():
            for on_device, host in zip(self._cache.states.slot(slot), self._states, strict=True):
                on_host = host[kept - 1]
                target, source = (on_device, on_host) if back else (on_host, on_device)
                target.copy_(source, non_blocking=True)

    async def stored(self, work: str, name: bytes, slots: Sequence[int], state: int = 0) -> None:
        """Save slots to the file of a page group or state, load them from it, or remove the file.

        Args:
            work: `save`, `load` or `remove`.
            name: The name of the group or state (see `store_tier`).
            slots: The host-memory slots to save, or to load into.
            state: The slot of a state, in place of `slots`; 0: pages are meant.
        Raises:
            StoreError: The file cannot be used.
        """
        assert self.files is not None
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._stored, self.files, work, name, slots, state)

    def _stored(self, files: KVFiles, work: str, name: bytes, slots: Sequence[int], state: int) -> None:
        if work == "remove":
            files.remove(name)
            return
        own, dim, slots_N = self.sides, 1, torch.tensor(slots)
        if state:
            own, dim, slots_N = self._states, 0, torch.tensor([state - 1])
        if work == "save":
            files.save(name, [side.index_select(dim, slots_N) for side in own])
            return
        for side, loaded in zip(own, files.load(name), strict=True):
            side.index_copy_(dim, slots_N, loaded)

    def close(self) -> None:
        self._threads.shutdown()


class RankStates:
    """Reads and writes a rank's states for other processes and for host memory, on the stream of received KV.

    Args:
        cache: The rank's KV cache, which has the states.
        host: The rank's host memory; None: there is none.
    """

    def __init__(self, cache: PagedKVCache, host: HostMemory | None = None) -> None:
        assert cache.states is not None, "the model has states"
        self._cache, self._states, self._host = cache, cache.states, host

    def write(self, slots: Sequence[int], layers: Sequence[int], arrays: Sequence[Any]) -> None:
        """Write this rank's part of a state (`StateCache.write`)."""
        with self._cache.moving():
            self._states.write(slots, layers, arrays)

    def read(self, slot: int) -> tuple[Any, ...]:
        """Return the arrays of this rank's part of a state, in host memory."""
        with self._cache.moving():
            copied = self._states.to_host(slot)
        return packed(copied)

    def move(self, slot: int, kept: int, back: bool) -> None:
        """Run `HostMemory.copy_state`."""
        assert self._host is not None
        self._host.copy_state(slot, kept, back)


class RanksMemory:
    """The host memory of all ranks of a decode worker.

    Args:
        own: Rank 0's host memory.
        thread: Runs rank 0's copies.
        lose: Called with the error of a rank's call, unless it is a StoreError.
    """

    def __init__(
        self, own: HostMemory, thread: Executor, ranks: Sequence[Rank], lose: Callable[[BaseException], None]
    ) -> None:
        self.slots, self.files, self.state_slots = own.slots, own.files, own.state_slots
        self.page_bytes = page_bytes(own.sides) * (1 + len(ranks))
        self.state_bytes = own.state_bytes * (1 + len(ranks))
        self._own, self._thread, self._ranks, self._lose = own, thread, ranks, lose

    async def move(self, runs: Runs, layers: range, back: bool) -> None:
        """Run `HostMemory.copy` on every rank, and wait for all ranks. Raises a failed rank's error."""
        own = asyncio.get_running_loop().run_in_executor(self._thread, self._own.copy, runs, layers, back)
        await self._all(own, [rank.move(runs, layers, back) for rank in self._ranks])

    async def move_state(self, slot: int, kept: int, back: bool) -> None:
        """Run `HostMemory.copy_state` on every rank, and wait for all ranks. Raises a failed rank's error."""
        loop = asyncio.get_running_loop()
        own = loop.run_in_executor(self._thread, self._own.copy_state, slot, kept, back)
        await self._all(own, [rank.state("move", slot, kept, back) for rank in self._ranks])

    async def stored(self, work: str, name: bytes, slots: Sequence[int], state: int) -> None:
        """Run `HostMemory.stored` on every rank. Raises StoreError."""
        others = [rank.stored(work, name, slots, state) for rank in self._ranks]
        await self._all(self._own.stored(work, name, slots, state), others)

    async def _all(self, own: Awaitable[None], others: Sequence[Awaitable[None]]) -> None:
        outcomes = await asyncio.gather(own, *others, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                if not isinstance(outcome, StoreError):
                    self._lose(outcome)
                raise outcome

    def close(self) -> None:
        self._own.close()


def make_host_memory(cache: PagedKVCache, config: DecodeConfig, digest: str) -> HostMemory | None:
    """Make a rank's host memory; None if `host_cache_gib` is 0.

    Args:
        digest: The model's content digest, which is part of the names of saved files.
    Raises:
        ValueError: `host_cache_gib` is too small.
    """
    if not config.host_cache_gib:
        return None
    ranks = cache.model_heads // cache.kv_heads
    state, page = state_bytes(cache) * ranks, page_bytes(cache.sides) * ranks
    share = state_share(config.cache_tokens // PAGE_TOKENS * page, config.state_slots * state)
    room = int(config.host_cache_gib * 2**30)
    for_states = int(room * share)
    slots, state_slots = (room - for_states) // page, for_states // state if state else 0
    if slots < BATCH_PAGES or (state and not state_slots):
        least = least_gib(page, state, share)
        raise ValueError(
            f"decode.host_cache_gib: {config.host_cache_gib:g} is too little, {least:.3f} is the least"
        )
    files = KVFiles(Path(config.store), kv_form(cache, digest)) if config.store else None
    return HostMemory(cache, slots, files, state_slots)


def kv_form(cache: PagedKVCache, digest: str) -> str:
    """Return a string of everything but the prompt and its prefix-cache key that determines a rank's KV.

    Saved KV is loaded only into a cache with an equal string.
    """
    shapes = [(tuple(side.shape[2:]), str(side.dtype)) for side in cache.sides]
    if cache.states is not None:
        shapes += [(tuple(state_L.shape), str(state_L.dtype)) for state_L in cache.states.slot(0)]
    return repr((digest, str(cache.model_dtype), cache.layers, shapes, cache.heads, cache.model_heads))


def pages_of(gib: float, cache: PagedKVCache) -> int:
    """Return the number of pages that fit into `gib` GiB, which all tensor-parallel ranks share: a page
    counts with the heads of all ranks."""
    return int(gib * 2**30) // (page_bytes(cache.sides) * (cache.model_heads // cache.kv_heads))


def page_bytes(cache_sides: Sequence[torch.Tensor]) -> int:
    """Return the bytes of one page over all layers and all tensors of the cache."""
    return sum(len(side) * prod(side.shape[2:]) * side.element_size() for side in cache_sides)


def state_bytes(cache: PagedKVCache) -> int:
    """Return the bytes of one state; 0 if the model has none."""
    own = () if cache.states is None else cache.states.slot(0)
    return sum(state_L.numel() * state_L.element_size() for state_L in own)


def _pinned(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Allocate host memory with the dtype of `like`, pinned if `like` is on a GPU.

    torch's own allocator would round pinned memory up to a power of two.
    """
    memory = np.zeros(prod(shape) * like.element_size(), dtype=np.uint8)
    if like.is_cuda:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(like.device):
            failed = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if int(failed):
            raise MemoryError(f"{memory.nbytes:,} bytes of host memory cannot be pinned: CUDA error {failed}")
    return torch.from_numpy(memory).view(like.dtype).view(shape)
