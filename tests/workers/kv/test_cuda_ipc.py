"""Tests KV that a decode worker copies from a stage's pages by CUDA IPC, in addition to
`test_exported_pages.py`. Device and Ray are stand-ins: a handle refers to a tensor of this process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.handoff.protocols import HandoffError
from deltafront.workers.kv.handoff.transports import kv_reader, kv_sender
from deltafront.workers.kv.peer_memory import CudaPeerMemory, home
from deltafront.workers.settings import HandoffConfig

from .export_bench import DIM, HEADS, Bench, ByCudaIpc

CONFIG = HandoffConfig(transport="cuda_ipc")


async def test_kv_copied_by_cuda_ipc_after_its_lease_ended_is_discarded() -> None:
    """The stage may have given the page to another request meanwhile."""
    bench = Bench(ByCudaIpc(), lease_s=30.0)
    bench.announce(range(4), 0, 32)
    (message,) = bench.ray.sent
    bench.clock.now += 30.0
    with pytest.raises(HandoffError, match=r"KV of r, layers 3 \.\. 5 at 0 was read too late"):
        await bench.deliver(message, range(2))
    assert not bench.in_use("r"), "the same clock says so on both sides"


async def test_dead_stage_fails_its_announcements_and_is_unmapped() -> None:
    way = ByCudaIpc()
    bench = Bench(way)
    bench.announce(range(4), 0, 32)
    bench.announce(range(4), 32, 32)
    for message in bench.ray.sent:
        await bench.deliver(message, range(4))
    assert way.peers.opened == [0, 1], "mapped once"
    assert bench.reader._mapped
    assert len(way.peers.gone[message.payload.cache.pid]) == 1, "watched once: each watch is an open file"
    way.peers.end(message.payload.cache.pid)
    assert not bench.reader._mapped, "its memory is not kept from the next stage"
    with pytest.raises(HandoffError, match=r"cannot be reached: RuntimeError: invalid resource handle$"):
        await bench.deliver(message, range(4))


async def test_refuses_pages_of_another_host() -> None:
    way = ByCudaIpc()
    bench = Bench(way)
    bench.announce(range(4), 0, 32)
    (message,) = bench.ray.sent
    there = replace(message.payload, cache=replace(message.payload.cache, home="elsewhere"))
    says = r"on another host .*elsewhere; here: a host.*: use nixl or object_store"
    with pytest.raises(HandoffError, match=says):
        await bench.deliver(replace(message, payload=there), range(2))
    assert not way.touched


def test_cuda_ipc_refuses_a_cpu() -> None:
    cache = PagedKVCache(range(1), HEADS, DIM, 2, torch.float32, "cpu")
    for end in (lambda: kv_sender(CONFIG, cache), lambda: kv_reader(CONFIG, cache, ThreadPoolExecutor(1))):
        with pytest.raises(ValueError, match="CUDA IPC needs a GPU, not cpu"):
            end()
    assert home() == home() and "pid:" in home()


async def test_decode_worker_notices_the_end_of_a_stages_process() -> None:
    """Covers a child process, and a process that has already ended."""
    memory = CudaPeerMemory.__new__(CudaPeerMemory)
    child = await asyncio.create_subprocess_exec("sleep", "60")
    gone = asyncio.Event()
    memory.when_gone(child.pid, gone.set)
    await asyncio.sleep(0)
    assert not gone.is_set()
    child.kill()
    await asyncio.wait_for(gone.wait(), 60)
    await child.wait()
    gone.clear()
    memory.when_gone(child.pid, gone.set)
    await asyncio.wait_for(gone.wait(), 60)


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")
def test_cuda_memory_is_read_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(
        Path(__file__).resolve().parents[3]
    )  # where the other process finds this module
    context = torch.multiprocessing.get_context("spawn")
    x = torch.arange(4096, device="cuda", dtype=torch.float32)
    memory = CudaPeerMemory(x.device)
    ours, theirs = context.Pipe()
    process = context.Process(target=_read, args=(theirs,))
    process.start()
    ours.send(memory.export(x))
    assert ours.poll(60) and ours.recv() == x.sum().item()
    x += 1
    torch.cuda.synchronize()
    ours.send("again")
    assert ours.poll(60) and ours.recv() == x.sum().item()
    process.join(60)


def _read(pipe: Any) -> None:
    memory = CudaPeerMemory(torch.device("cuda"))
    opened = memory.open(pipe.recv())
    pipe.send(opened.sum().item())
    pipe.recv()
    pipe.send(opened.sum().item())
    del opened
