"""Tests the real NIXL between processes of this host over TCP, as between hosts: pages byte for byte, and
deaths during a transfer. A stopped process makes a transfer last as long as a test needs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.handoff.nixl import NixlExporter, NixlReader
from deltafront.workers.kv.handoff.nixl_agent import new_agent
from deltafront.workers.kv.handoff.protocols import HandoffError
from deltafront.workers.kv.pages.pool import row_runs
from deltafront.workers.messages.stages import KVAnnouncement

from .fake_nixl import needs_nixl

pytestmark = needs_nixl

ROOT = Path(__file__).resolve().parents[3]
PAGES, TOKENS, HEADS, DIM = 512, 8192, 2, 32
LAYERS = range(2, 6)
THEIRS = tuple(reversed(range(PAGES)))
PATIENCE_S = 300


def cache_of(layers: range) -> PagedKVCache:
    return PagedKVCache(layers, HEADS, DIM, PAGES, torch.float32, "cpu")


def filled() -> PagedKVCache:
    """Return the stage's cache. It is the same in every process."""
    cache = cache_of(LAYERS)
    generator = torch.Generator().manual_seed(5)
    for side in (cache.k_LPSGD, cache.v_LPSGD):
        side.copy_(torch.randn(side.shape, generator=generator))
    return cache


def serve(pipe: Any) -> None:
    """Run a stage's process: export all of its pages to each request, until told to revoke the export."""
    cache = filled()
    exporter, exports = NixlExporter(cache, new_agent()), {}
    rows = row_runs(THEIRS, 0, TOKENS)
    while True:
        order, name = pipe.recv()
        if order == "export":
            exports[name] = exporter.export(THEIRS)
            payload = exports[name].payload([rows] * len(LAYERS))
            pipe.send(
                KVAnnouncement(
                    request_id=name,
                    layer=LAYERS.start,
                    start=0,
                    tokens=TOKENS,
                    payload=payload,
                    layers=len(LAYERS),
                )
            )
        elif order == "revoke":
            exports[name].revoke()
            for side in (cache.k_LPSGD, cache.v_LPSGD):
                side.fill_(-1.0)
            pipe.send("done")


def read(pipe: Any) -> None:
    """Run a decode worker's process: copy announced KV, and report the result of each announcement."""
    asyncio.run(_read(pipe))


async def _read(pipe: Any) -> None:
    reader, cache = worker()
    while True:
        message = await asyncio.to_thread(pipe.recv)
        reading = asyncio.create_task(reader.read(message, LAYERS, use_pages))
        await under_way(reader, reading)
        pipe.send("under way")
        await reading
        pipe.send(rows_that_differ(cache))


def worker() -> tuple[NixlReader, PagedKVCache]:
    cache = cache_of(range(8))
    cache.k_LPSGD.fill_(torch.nan), cache.v_LPSGD.fill_(torch.nan)
    return NixlReader(cache, ThreadPoolExecutor(1), new_agent), cache


@contextlib.contextmanager
def use_pages() -> Iterator[Sequence[int]]:
    yield range(PAGES)


async def under_way(reader: NixlReader, reading: asyncio.Task[int]) -> None:
    """Wait until a transfer runs; if no stopped process delays it, it may also have ended."""
    while not reader._reading.total() and not reading.done():
        await asyncio.sleep(0.001)


def rows_that_differ(cache: PagedKVCache) -> int:
    """Return the rows that differ from the stage's, in any layer. Rows that the stage does not have must be
    NaN."""
    stage, wrong = filled(), 0
    for ours, theirs in ((cache.k_LPSGD, stage.k_LPSGD), (cache.v_LPSGD, stage.v_LPSGD)):
        wanted = torch.full_like(ours, torch.nan)
        wanted[LAYERS.start : LAYERS.stop] = theirs[:, torch.tensor(THEIRS)]
        same = (ours == wanted) | (ours.isnan() & wanted.isnan())
        wrong += int((~same).any(-1).any(-1).sum())
    return wrong


class Child:
    def __init__(self, work: Callable[[Any], None]) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()

    def ask(self, *order: Any) -> Any:
        self.pipe.send(order)
        return self.hear()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), "no answer"
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Child]]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.syspath_prepend(ROOT)  # where a spawned process finds this module
    children: list[Child] = []

    def child(work: Callable[[Any], None]) -> Child:
        children.append(Child(work))
        return children[-1]

    yield child
    for one in children:
        one.end()


async def test_copies_pages_between_processes_until_the_lease_ends(start: Callable[..., Child]) -> None:
    stage = start(serve)
    reader, cache = worker()
    message = stage.ask("export", "r")
    assert await reader.read(message, LAYERS, use_pages) == 2 * len(LAYERS) * TOKENS * HEADS * DIM * 4
    assert rows_that_differ(cache) == 0
    assert stage.ask("revoke", "r") == "done"
    with pytest.raises(HandoffError, match="was read too late"):
        await reader.read(message, LAYERS, use_pages)


async def test_stage_that_dies_mid_transfer_does_not_block_other_transfers(
    start: Callable[..., Child],
) -> None:
    dying, other = start(serve), start(serve)
    reader, cache = worker()
    message, good = dying.ask("export", "r"), other.ask("export", "s")
    await reader.read(message, LAYERS, use_pages)
    dying.signal(signal.SIGSTOP)
    reading = asyncio.create_task(reader.read(message, LAYERS, use_pages))
    await under_way(reader, reading)
    cache.k_LPSGD.fill_(torch.nan), cache.v_LPSGD.fill_(torch.nan)
    await reader.read(good, LAYERS, use_pages)
    assert not reading.done() and rows_that_differ(cache) == 0, "nobody waits for the stage that hangs"
    dying.end()
    with pytest.raises(HandoffError, match=r"KV of r, layers 2 \.\. 5 at 0 could not be read: nixl"):
        await reading
    await reader.read(good, LAYERS, use_pages)


async def test_decode_worker_that_dies_mid_transfer_does_not_harm_its_stage(
    start: Callable[..., Child],
) -> None:
    """The stage runs meanwhile: UCX may end a stopped process (docs/log/2026-11-22.md at 4fe709c6)."""
    stage, dying = start(serve), start(read)
    message = stage.ask("export", "r")
    dying.pipe.send(message)
    assert dying.hear() == "under way" and dying.hear() == 0
    dying.pipe.send(message)
    assert dying.hear() == "under way"
    dying.end()
    reader, cache = worker()
    await reader.read(stage.ask("export", "s"), LAYERS, use_pages)
    assert rows_that_differ(cache) == 0
