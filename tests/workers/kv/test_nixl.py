"""Tests KV that a decode worker reads from a stage's pages by NIXL, in addition to `test_exported_pages.py`.
`Fabric` stands in for NIXL. If NIXL is installed, some tests run with it: here in one process, and between
processes in `test_nixl_processes.py`."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.handoff.protocols import HandoffError
from deltafront.workers.kv.handoff.transports import kv_reader, kv_sender
from deltafront.workers.messages.requests import DecodeFailed
from deltafront.workers.messages.stages import KVAnnouncement
from deltafront.workers.settings import HandoffConfig

from . import test_exported_pages
from .export_bench import DIM, HEADS, Bench, ByNixl, ByRealNixl
from .fake_nixl import needs_nixl

CONFIG = HandoffConfig(transport="nixl")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.001)


def announced(bench: Bench, name: str = "r", first: int = 0) -> KVAnnouncement:
    """Announce 32 tokens in pages first .. first+3."""
    bench.announce(range(first, first + 4), 0, 32, name)
    message: KVAnnouncement = bench.ray.sent[-1]
    return message


# --- leases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", [0, 1], ids=["before the rows", "before their lease"])
async def test_kv_is_discarded_if_its_lease_ends_during_the_transfer(moment: int) -> None:
    """The lease is read last, so that KV overwritten at any time is noticed."""
    way = ByNixl()
    bench = Bench(way, lease_s=30.0)
    message = announced(bench)

    def give_away(number: int) -> None:
        if number == moment:
            bench.clock.now += 30.0
            assert not bench.in_use("r")
            bench.stage.k_LPSGD.fill_(-1.0)

    way.fabric.on_begin = give_away
    with pytest.raises(HandoffError, match="was read too late"):
        await bench.deliver(message, range(2))


def test_nixl_lease_ends_exactly_when_its_pages_are_freed() -> None:
    """Announcements, answers and time come in any order, for requests that use one another's pages."""
    for seed in range(60):
        rng = random.Random(seed)
        bench = Bench(ByNixl(), lease_s=10.0)
        pages: dict[str, int] = {}
        leases: dict[str, set[tuple[int, int]]] = {}
        for number in range(60):
            event = rng.choice(("announce", "announce", "answer", "wait", "close"))
            name = rng.choice([*pages, f"r{number}"])
            if event == "announce" and len(pages) < 4:
                sent = len(bench.ray.sent)
                page = pages.setdefault(name, min({*range(4)} - {*pages.values()}))
                bench.stream(name, (page,)).put(3, 0, *torch.zeros(2, 16, HEADS, DIM))
                bench.stream(name, (page,)).end_chunk()
                for message in bench.ray.sent[sent:]:  # none if this request has failed
                    kv = message.payload
                    leases.setdefault(name, set()).add((kv.lease[0], kv.serial))
            elif event == "answer" and bench.ray.sent:
                bench.ray.answered.add(rng.randrange(len(bench.ray.sent)))
            elif event == "wait":
                bench.clock.now += rng.choice((0.5, 4.0))
            elif event == "close" and pages:
                name = rng.choice([*pages])
                if not bench.in_use(name):
                    del pages[name]
                    gone = leases.pop(name, set())
                    assert not any(valid(bench, lease) for lease in gone), (seed, "its pages are free")
            assert all(any(valid(bench, one) for one in mine) for mine in leases.values()), seed


def valid(bench: Bench, lease: tuple[int, int]) -> bool:
    words = bench.exporter._leases
    return lease in {(words.span(page)[0], words[page]) for page in range(bench.stage.pages)}


# --- deaths -----------------------------------------------------------------------------------------------


async def test_pages_stay_allocated_while_a_transfer_may_write_them() -> None:
    """NIXL cannot stop a transfer, so that the pages of a hung one stay allocated."""
    way = ByNixl()
    bench = Bench(way)
    message = announced(bench)
    way.fabric.stalled.add("agent-0")
    reading = asyncio.create_task(bench.deliver(message, range(2)))
    await until(lambda: way.fabric.under_way == 1)
    assert bench.held == 1 and not reading.done()
    way.fabric.stalled.clear()
    assert await reading and bench.held == 0 and way.fabric.under_way == 0


async def test_stage_that_dies_mid_transfer_fails_only_its_announcements() -> None:
    way = ByNixl()
    dying, other = Bench(way), Bench(way)
    worker = other.reader
    dying.reader, dying.worker = worker, other.worker
    messages = [announced(dying), announced(dying, "s", 4)]
    way.fabric.stalled.add("agent-0")
    reading = [
        asyncio.create_task(dying.deliver(message, range(2 * n, 2 * n + 2)))
        for n, message in enumerate(messages)
    ]
    await until(lambda: way.fabric.under_way == 2)
    made = other.announce(range(4), 0, 32, "t")
    assert await other.deliver(other.ray.sent[-1], range(10, 12)), "nobody waits for the stage that hangs"
    way.fabric.dead.add("agent-0")
    for outcome in await asyncio.gather(*reading, return_exceptions=True):
        assert isinstance(outcome, HandoffError)
        assert "could not be read: Disconnected: NIXL_ERR_REMOTE_DISCONNECT" in str(outcome)
    assert dying.held == 0 and way.fabric.under_way == 0
    assert not worker._agent.check_remote_metadata("agent-0"), "what is known of it is dropped"
    assert all(map(torch.equal, other.taken((10, 11), 3, 32), made[3]))
    assert other.written() == 2 * 3 * 32


async def test_failed_nixl_connection_is_reopened() -> None:
    way = ByNixl()
    bench = Bench(way)
    message, agent = announced(bench), bench.reader._agent
    way.fabric.stalled.add("agent-0")
    reading = asyncio.create_task(bench.deliver(message, range(2)))
    await until(lambda: way.fabric.under_way == 1)
    agent.broken.add("agent-0")
    with pytest.raises(HandoffError, match="Disconnected"):
        await reading
    way.fabric.stalled.clear()
    assert await bench.deliver(message, range(2))
    assert agent.connections == 2


async def test_refuses_a_transfer_outside_registered_memory() -> None:
    way = ByNixl()
    bench = Bench(way)
    message = announced(bench)
    object.__setattr__(message.payload, "rows", ((320, 32),))
    with pytest.raises(HandoffError, match=r"could not be read: KeyError: .*NIXL_ERR_NOT_FOUND"):
        await bench.deliver(message, range(2))
    assert not bench.written() and bench.held == 0


@pytest.mark.usefixtures("single_rank")
async def test_prompt_is_not_resumed_while_old_transfers_may_arrive(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the dead group's transfers could overwrite KV of the group that resumes."""
    way = ByNixl()
    monkeypatch.setattr("deltafront.workers.kv.handoff.nixl.new_agent", way.agent)
    run = await bench(reader=partial(kv_reader, CONFIG))
    cache = run.engine._runner.cache
    stage = PagedKVCache(cache.layers, cache.kv_heads, cache.head_dim, 8, cache.dtype, "cpu")
    exporter = way.exporter(stage, 60.0, lambda: 0.0)
    await run.reserve("a", 70, 8)
    message = KVAnnouncement(
        request_id="a", layer=0, start=0, tokens=32, payload=exporter.export((0, 1)).payload([((0, 32),)])
    )
    way.fabric.stalled.add(exporter._agent.name)
    reading = asyncio.create_task(run.engine.announce(message))
    await until(lambda: way.fabric.under_way == 1)
    resuming = asyncio.create_task(run.engine.resume("a", [32], 1))
    ending = asyncio.create_task(run.engine.resume("b", [32], 1))
    with pytest.raises(DecodeFailed, match="b is not being read here"):
        await ending
    await asyncio.sleep(0.01)
    assert not resuming.done()
    way.fabric.dead.add(exporter._agent.name)
    with pytest.raises(HandoffError):
        await reading
    assert await resuming == 0
    await run.engine.cancel("a")


# --- the real NIXL, and its absence -----------------------------------------------------------------------


@needs_nixl
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_real_nixl_copies_pages(dtype: torch.dtype) -> None:
    theirs, ours = (9, 10, 3, 4, 0, 15, 16), (20, 3, 4, 29, 1, 0, 7)
    await test_exported_pages.test_chunks_arrive_from_contiguous_and_scattered_pages(
        ByRealNixl(), theirs, ours, dtype
    )


@needs_nixl
async def test_real_nixl_reads_the_lease() -> None:
    await test_exported_pages.test_kv_copied_after_its_pages_were_reused_is_discarded(ByRealNixl())


def test_sender_and_reader_name_the_missing_nixl_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    cache = PagedKVCache(range(1), HEADS, DIM, 2, torch.float32, "cpu")
    for end in (lambda: kv_sender(CONFIG, cache), lambda: kv_reader(CONFIG, cache, ThreadPoolExecutor(1))):
        with pytest.raises(ValueError, match=r"^handoff\.transport: nixl needs the package nixl"):
            end()
