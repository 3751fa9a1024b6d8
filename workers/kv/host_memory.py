"""Pages of K/V in host memory: their slots, and copies between them and the cache's pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from math import prod
from typing import Any

import numpy as np
import torch

from ..roles import Rank
from .cache import PagedKVCache
from .pages.host_tier import BATCH_PAGES
from .pages.pool import PAGE_TOKENS, paired_runs, row_runs


class HostMemory:
    """`slots` pages of host memory, in the cache's form: [layers, slots, page_tokens, …] for each side.

    A GPU's copy engines read and write it directly, so it is pinned: that takes seconds for some tens of GiB.
    One rank's heads, as in its cache.
    """

    def __init__(self, cache: PagedKVCache, slots: int) -> None:
        self._cache, self.slots = cache, slots
        self.sides = [_pinned((len(side), slots, *side.shape[2:]), side) for side in cache.sides]

    @torch.inference_mode()
    def copy(self, pages: Sequence[int], slots: Sequence[int], back: bool) -> None:
        """Copy pages to as many slots; `back`: slots to pages. Returns when all are there.

        Pages and slots in a row are one copy a layer, on a stream of its own.
        """
        runs = [row_runs(places, 0, len(places) * PAGE_TOKENS) for places in (pages, slots)]
        pieces = [[row // PAGE_TOKENS for row in piece] for piece in paired_runs(*runs)]
        with self._cache.moving():
            for side, host in zip(self._cache.sides, self.sides, strict=True):
                for page, slot, count in pieces:
                    for layer in range(len(side)):
                        on_device = side[layer, page : page + count]
                        on_host = host[layer, slot : slot + count]
                        target, source = (on_device, on_host) if back else (on_host, on_device)
                        target.copy_(source, non_blocking=True)


class RanksMemory:
    """The host memory of all ranks of a worker. own: rank 0's. thread: that copies it. lose: told that a rank
    is gone."""

    def __init__(
        self, own: HostMemory, thread: Executor, ranks: Sequence[Rank], lose: Callable[[BaseException], None]
    ) -> None:
        self.slots = own.slots
        self._own, self._thread, self._ranks, self._lose = own, thread, ranks, lose

    async def move(self, pages: Sequence[int], slots: Sequence[int], back: bool) -> None:
        """Copy on every rank. Returns when all have, also where one has failed. Raises DecodeFailed."""
        own = asyncio.get_running_loop().run_in_executor(self._thread, self._own.copy, pages, slots, back)
        others = [rank.move(pages, slots, back) for rank in self._ranks]
        for outcome in await asyncio.gather(own, *others, return_exceptions=True):
            if isinstance(outcome, BaseException):
                self._lose(outcome)
                raise outcome


def make_host_memory(cache: PagedKVCache, gib: float) -> HostMemory | None:
    """Return a rank's part of a worker's `gib` of host memory; None for 0. Raises ValueError: too little."""
    if not gib:
        return None
    ranks = cache.model_heads // cache.kv_heads
    page = page_bytes(cache.sides) * ranks
    slots = int(gib * 2**30) // page
    if slots < BATCH_PAGES:
        least = BATCH_PAGES * page / 2**30
        raise ValueError(f"decode.host_cache_gib: {gib:g} is too little, {least:.3f} is the least")
    return HostMemory(cache, slots)


def page_bytes(cache_sides: Sequence[torch.Tensor]) -> int:
    """Return what a page of all layers takes."""
    return sum(len(side) * prod(side.shape[2:]) * side.element_size() for side in cache_sides)


def _pinned(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Host memory of the type of `like`, pinned for its GPU. torch's own would be rounded up to a power of
    two. Raises MemoryError."""
    memory = np.zeros(prod(shape) * like.element_size(), dtype=np.uint8)
    if like.is_cuda:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(like.device):
            failed = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if int(failed):
            raise MemoryError(f"{memory.nbytes:,} bytes of host memory cannot be pinned: CUDA error {failed}")
    return torch.from_numpy(memory).view(like.dtype).view(shape)
