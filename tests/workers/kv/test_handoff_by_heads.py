"""Tests that each rank of a decode worker gets its heads' KV from every stage, with every transport."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from deltafront.workers.decode.ranks import RanksReader, joined_heads
from deltafront.workers.kv.cache import PagedKVCache, Sides
from deltafront.workers.kv.fetch import from_host, to_host
from deltafront.workers.kv.handoff.protocols import Destination, KVReader
from deltafront.workers.kv.pages.pool import pages_for
from deltafront.workers.messages.stages import HostKV, KVAnnouncement, KVRange
from deltafront.workers.settings import HandoffConfig

from .test_transports import LocalOutbox, without_ray_and_gpu

HEADS, DIM = 4, 8
POISON = 120
"""A byte that occurs neither in the scales nor in the random KV."""
STAGES = (range(3), range(3, 5))


class Collected:
    """Collects the announcements of stages."""

    def __init__(self) -> None:
        self.announced: list[KVAnnouncement] = []

    def announce(self, announcement: KVAnnouncement) -> None:
        self.announced.append(announcement)


class ReaderRank:
    """The part of a `Rank` that reads KV."""

    def __init__(self, cache: PagedKVCache, reader: KVReader) -> None:
        self._cache, self._reader = cache, reader

    def compute(self, work: str, *arguments: object) -> None:
        raise NotImplementedError

    async def read(self, announcement: KVAnnouncement, layers: Sequence[int], pages: Sequence[int]) -> int:
        return await self._reader.read(announcement, layers, lambda: nullcontext(pages))

    async def kv(self, wanted: KVRange, pages: Sequence[int]) -> HostKV:
        return to_host(self._cache, pages, wanted)


def poisoned(layers: range, heads: int, pages: int, dtype: torch.dtype, **rank: Any) -> PagedKVCache:
    """Return a cache filled with NaN; in 8 bits, with POISON."""
    cache = PagedKVCache(layers, heads, DIM, pages, dtype, "cpu", **rank)
    for side in cache.sides:
        side.fill_(POISON if cache.int8 else torch.nan)
    return cache


def drawn_sides(tokens: int, dtype: torch.dtype, int8: bool) -> Sides:
    if not int8:
        return tuple(torch.randn(2, tokens, HEADS, DIM).to(dtype))
    numbers = torch.randint(0, POISON, (2, tokens, HEADS, DIM), dtype=torch.uint8)
    scales = torch.randint(8, POISON, (2, tokens, HEADS), dtype=torch.uint8)
    return (*numbers, *scales)


def ragged(draw: random.Random, tokens: int) -> Iterator[tuple[int, int]]:
    """Cut a prompt into chunks of random length: (start, tokens)."""
    start = 0
    while start < tokens:
        count = min(draw.randint(1, 50), tokens - start)
        yield start, count
        start += count


@pytest.mark.parametrize("transport", ["object_store", "cuda_ipc", "nixl"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("int8", [False, True])
async def test_each_rank_receives_only_the_kv_of_its_heads(
    transport: str, ranks: int, seed: int, int8: bool
) -> None:
    """Two stages send ragged chunks into scattered pages. All ranks together transfer as many bytes as one
    rank would. KV that was not handed over stays poisoned. A stage that fetches the KV gets it unchanged."""
    draw = random.Random(seed)
    dtype = torch.bfloat16 if seed % 2 else torch.float32
    tokens, layers = draw.randint(1, 150), range(STAGES[-1].stop)
    theirs, ours = (draw.sample(range(20), pages_for(tokens)) for _ in range(2))
    box, config = LocalOutbox(), HandoffConfig()
    box.receiver = Collected()
    ends = without_ray_and_gpu(transport, box, ranks)
    of_ranks = [{"rank": n, "ranks": ranks, "int8": int8} for n in range(ranks)]
    caches = [poisoned(layers, HEADS // ranks, 20, dtype, **rank) for rank in of_ranks]
    readers = [ends.reader(config, cache, ThreadPoolExecutor(1)) for cache in caches]
    others = [ReaderRank(*pair) for pair in zip(caches[1:], readers[1:], strict=True)]
    lost = list[BaseException]()
    reader = RanksReader(readers[0], others, lost.append)

    whole = {layer: drawn_sides(tokens, dtype, int8) for layer in layers}
    streams = []
    for share in STAGES:
        stage = poisoned(share, HEADS, 20, dtype, int8=int8)
        stream = ends.sender(config, stage).open(
            Destination(request_id="r", decode_worker="decode:x", pages=theirs)
        )
        for start, count in ragged(draw, tokens):
            for layer in share:
                sides_T = [side_T[start : start + count] for side_T in whole[layer]]
                stage.write(layer, torch.tensor(theirs), start, *sides_T)
                stream.put(layer, start, *sides_T)
            stream.end_chunk()()
        streams.append(stream)
    received = box.receiver.announced
    draw.shuffle(received)
    moved = 0
    for message in received:
        covered = range(message.layer, message.layer + message.layers)
        moved += await reader.read(message, covered, lambda: nullcontext(ours))
    assert moved == sum(x.nbytes for sides in whole.values() for x in sides) and not lost
    assert all(stream.close() for stream in streams)
    for cache in caches:
        for layer in layers:
            arrived = cache.read(layer, ours, 0, tokens)
            wanted_here = [side_T[:, cache.heads] for side_T in whole[layer]]
            assert all(map(torch.equal, arrived, wanted_here))
        for side in cache.sides:
            kept = side != POISON if int8 else ~side.isnan()
            assert int(kept.sum()) == len(layers) * tokens * math.prod(side.shape[3:])
    start = draw.randrange(tokens)
    wanted = KVRange(request_id="r", layer=3, start=start, tokens=tokens - start)
    back = joined_heads([to_host(cache, ours, wanted) for cache in caches])
    one = poisoned(layers, HEADS, 20, dtype, int8=int8)
    one.write_layers(ours, 0, {3: whole[3]})
    again = to_host(one, ours, wanted)
    arrays = [(kv.k, kv.v, *kv.scales) for kv in (back, again)]
    assert len(arrays[0]) == len(whole[3]) and all(map(np.array_equal, *arrays))
    returned = from_host(back, wanted, one)
    assert all(map(torch.equal, returned, [side_T[start:] for side_T in whole[3]]))
