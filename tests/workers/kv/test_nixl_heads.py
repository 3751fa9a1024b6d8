"""Tests KV that a stage gathers by ranks for `nixl`: its place, the number of descriptors, and the reuse of
slots. `test_handoff_by_heads.py` tests that the bytes arrive."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from deltafront.workers.kv.cache import PagedKVCache, Sides
from deltafront.workers.kv.handoff.nixl import NixlReader, gathered_kv
from deltafront.workers.kv.handoff.nixl_heads import (
    MESSAGE_BYTES,
    Gathered,
    GatheringOutbox,
    GatherSlots,
    slot_bytes,
)
from deltafront.workers.kv.handoff.outbox import Delivery
from deltafront.workers.kv.handoff.protocols import HandoffError
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, row_runs
from deltafront.workers.messages.stages import KVAnnouncement

from .fake_nixl import Fabric
from .test_object_store import FakeRay

HEADS, DIM, TOKENS = 4, 8, 20
PROMPT, CHUNK = 131_072, 16_384
ROW = 8 * 128 * 2
"""Bytes of a token's K or V in one layer: 8 heads of 128 channels in 16 bits, in 8B and in 70B."""


def drawn(chance: random.Random) -> Gathered:
    ranks = chance.choice([1, 2, 4, 8])
    sides = tuple(ranks * chance.randint(1, 5) for _ in range(chance.choice([2, 4])))
    return Gathered(1000, ranks, chance.randint(1, 4), chance.randint(1, 50), sides)


@pytest.mark.parametrize("seed", range(20))
def test_slot_parts_cover_a_nixl_message_without_overlap(seed: int) -> None:
    one = drawn(random.Random(seed))
    parts = [
        one.part(rank, layer, side)
        for rank in range(one.ranks)
        for layer in range(one.layers)
        for side in range(len(one.row_bytes))
    ]
    end = 1000
    for address, size in parts:
        assert address == end
        end += size
    assert end == 1000 + one.bytes


@pytest.mark.parametrize("layers", [32, 80], ids=["8B", "70B"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_nixl_descriptor_covers_one_page_run_of_k_or_v_in_a_layer(layers: int, ranks: int) -> None:
    """A run is a chunk's tokens in contiguous pages, at worst a page. Before, each token was one: 131,072."""
    contiguous = scattered = moved = 0
    for start in range(0, PROMPT, CHUNK):
        message = Gathered(0, ranks, 1, CHUNK, (ROW, ROW))
        run = row_runs(range(PROMPT // PAGE_TOKENS), start, CHUNK)
        pages = row_runs(range(0, 2 * PROMPT // PAGE_TOKENS, 2), start, CHUNK)
        for side in range(2):
            reads = list(message.reads(ranks - 1, 0, side, 0, run))
            contiguous += len(reads)
            moved += sum(size for _source, _target, size in reads)
            scattered += len(list(message.reads(ranks - 1, 0, side, 0, pages)))
    assert layers * contiguous == 2 * layers * PROMPT // CHUNK
    assert layers * scattered == 2 * layers * PROMPT // PAGE_TOKENS
    assert moved == 2 * PROMPT * ROW // ranks


def test_a_nixl_slot_holds_the_longest_message() -> None:
    cache = PagedKVCache(range(32), 8, 128, 1, torch.bfloat16, "meta")
    assert slot_bytes(cache, CHUNK) == MESSAGE_BYTES + CHUNK * 2 * ROW
    assert slot_bytes(cache, 128) == 32 * 128 * 2 * ROW, "a short chunk's layers all travel together"


def sides(value: float) -> Sides:
    return torch.full((TOKENS, HEADS, DIM), value), torch.full((TOKENS, HEADS, DIM), -value)


class Setup:
    """A stage with slots for gathered messages, and one rank of a decode worker of two."""

    def __init__(self, slots: int) -> None:
        fabric, self.ray = Fabric(), FakeRay()
        stage = PagedKVCache(range(1), HEADS, DIM, 4, torch.float32, "cpu")
        self.rank = PagedKVCache(range(1), HEADS // 2, DIM, 4, torch.float32, "cpu", rank=1, ranks=2)
        agent = fabric.agent()
        self.slots = GatherSlots(stage, agent, 2, 2 * TOKENS * HEADS * DIM * 4, slots)
        self.outbox = GatheringOutbox(self.slots, gathered_kv(stage, agent), 60.0)
        self.outbox._ray = self.ray
        self.reader = NixlReader(self.rank, ThreadPoolExecutor(1), fabric.agent)

    def send(self, value: float, delivery: Delivery | None = None) -> None:
        message = KVAnnouncement(request_id="r", layer=0, start=0, tokens=TOKENS, payload=(sides(value),))
        self.outbox.send_kv(delivery or Delivery("decode:x"), message)

    async def read(self, number: int) -> torch.Tensor:
        """Read a sent message. Returns the rank's keys."""
        message = self.ray.sent[number]
        await self.reader.read(message, range(1), lambda: nullcontext((2, 0)))
        return self.rank.read(0, (2, 0), 0, TOKENS)[0]


async def test_outbox_reuses_a_slot_only_after_all_acknowledgements() -> None:
    run = Setup(slots=3)
    for value in range(9):
        run.send(float(value))
        assert len(run.ray.sent) - len(run.ray.answered) <= 3
        assert (await run.read(value) == value).all()
    assert len({message.payload.gathered.address for message in run.ray.sent}) <= 3


async def test_reading_a_reused_nixl_slot_too_late_raises_an_error() -> None:
    run = Setup(slots=2)
    for value in (1.0, 2.0, 3.0):
        run.send(value)
    first, third = (run.ray.sent[n].payload for n in (0, 2))
    assert first.gathered.address == third.gathered.address
    assert (await run.read(2) == 3.0).all()
    with pytest.raises(HandoffError, match="was read too late"):
        await run.read(0)


async def test_message_of_a_failed_request_frees_its_slot() -> None:
    run = Setup(slots=2)
    failed, gone = Delivery("decode:x", failure="lost"), Delivery("decode:gone")
    for _ in range(3):
        run.send(1.0, failed)
        run.send(1.0, gone)
    assert not run.ray.sent and gone.failure
    run.send(5.0)
    assert (await run.read(0) == 5.0).all()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ranks": 4}, "for decode workers of 4 ranks, this one has 2"),
        ({"tokens": 7}, "not what the stage has gathered"),
    ],
)
async def test_refuses_a_nixl_message_gathered_for_other_requests(changes: dict[str, Any], why: str) -> None:
    run = Setup(slots=2)
    run.send(1.0)
    message = run.ray.sent[0]
    wrong = replace(message.payload, gathered=replace(message.payload.gathered, **changes))
    run.ray.sent[0] = replace(message, payload=wrong)
    with pytest.raises(HandoffError, match=why):
        await run.read(0)
    whole = replace(message.payload, gathered=None)
    run.ray.sent[0] = replace(message, payload=whole)
    with pytest.raises(HandoffError, match="for decode workers of 1 ranks, this one has 2"):
        await run.read(0)
