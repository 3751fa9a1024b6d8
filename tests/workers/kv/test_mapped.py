"""Tests a stage that writes to a decode worker's own pages: how long the pages stay allocated."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from deltafront.workers.kv.arrival import KVArrival
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.handoff.inbox import KVInbox
from deltafront.workers.kv.handoff.mapped import MappedExport, MappedReader, MappedSender, PageWriters
from deltafront.workers.kv.handoff.outbox import ActorOutbox
from deltafront.workers.kv.handoff.protocols import Destination, HandoffError
from deltafront.workers.kv.pages.pool import PagePool
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.kv.peer_memory import ExportedObjects, export_objects, home, map_objects
from deltafront.workers.kv.states import LinearStates
from deltafront.workers.messages.requests import DecodeFailed
from deltafront.workers.messages.stages import (
    HandedState,
    KVAnnouncement,
    OpenedPages,
    OtherMemory,
    PageWriter,
)

from .export_bench import HEADS, Neighbours

LAYERS, DIM, CPU = range(2, 4), 8, torch.device("cpu")


@dataclass(frozen=True)
class Weights:
    """Views of one storage, and a tensor of another dtype."""

    first: torch.Tensor
    last: torch.Tensor
    half: torch.Tensor


def writer(pid: int, **changes: Any) -> PageWriter:
    return PageWriter(
        **{"request_id": "a", "attempt": 0, "home": home(), "pid": pid, "memory": "m", **changes}
    )


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


# --- mapped objects ---------------------------------------------------------------------------------------

WRITE_AND_END_WITH_IT = """
import pickle, sys, time
from deltafront.workers.kv.peer_memory import end_with, map_objects
exported = pickle.load(sys.stdin.buffer)
cache, rows = map_objects(exported, "cpu")
rows[1].fill_(7)
cache.write_run(3, 1, 0, rows[1].view(16, 2, 8), -rows[1].view(16, 2, 8))
end_with(int(sys.argv[1]))
print("written", flush=True)
time.sleep(600)
"""


def test_process_that_maps_tensors_writes_them_and_ends_with_owner() -> None:

    cache = PagedKVCache(LAYERS, HEADS, DIM, 4, torch.float32, "cpu")
    rows = torch.zeros(2, 16 * HEADS * DIM)
    exported, owner = export_objects((cache, rows), CPU), sleeper()
    child = subprocess.Popen(
        [sys.executable, "-c", WRITE_AND_END_WITH_IT, str(owner.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdin is not None and child.stdout is not None
        pickle.dump(exported, child.stdin)
        child.stdin.close()
        assert child.stdout.readline() == b"written\n"
        k_PSGD, v_PSGD = cache.layer(3)
        assert torch.equal(k_PSGD[1], torch.full_like(k_PSGD[1], 7)) and torch.equal(v_PSGD[1], -k_PSGD[1])
        assert not cache.k_LPSGD[0].any() and not k_PSGD[[0, 2, 3]].any() and not rows[0].any()
        assert child.poll() is None
        owner.kill()
        assert child.wait(120) == 1
    finally:
        owner.kill()
        child.kill()
        owner.wait()


def test_mapped_objects_equal_the_originals_and_share_tensors() -> None:
    whole = torch.arange(24.0).view(4, 6)
    weights = Weights(whole[:2], whole[2:, 1:3], torch.arange(5, dtype=torch.bfloat16))
    mapped = map_objects(export_objects(weights, CPU), CPU)
    for name, x in vars(weights).items():
        twin = getattr(mapped, name)
        assert torch.equal(twin, x) and twin.stride() == x.stride() and twin.dtype is x.dtype
        x.add_(1)
        assert torch.equal(twin, x)


def test_maps_an_int8_kv_cache_with_its_scales() -> None:
    cache = PagedKVCache(LAYERS, HEADS, DIM, 4, torch.bfloat16, "cpu", int8=True)
    twin = map_objects(export_objects(cache, CPU), CPU)
    assert twin.int8 and twin.model_dtype is torch.bfloat16 and twin.heads == cache.heads
    for number, (own, theirs) in enumerate(zip(cache.sides, twin.sides, strict=True)):
        theirs[:, 2].fill_(number + 1)
        assert torch.equal(own, theirs) and bool((own[:, 2] == number + 1).all()) and not own[:, 1].any()


def test_refuses_to_map_memory_of_another_host_or_gpu() -> None:
    exported = export_objects(torch.zeros(3), CPU)
    with pytest.raises(RuntimeError, match="another host or in another container"):
        map_objects(replace(exported, home="elsewhere"), CPU)
    with pytest.raises(RuntimeError, match="another GPU"):
        map_objects(replace(exported, gpu="GPU-1"), CPU)


def test_refuses_to_map_memory_of_a_dead_process() -> None:
    code = (
        "import pickle, sys, torch\n"
        "from deltafront.workers.kv.peer_memory import export_objects\n"
        "pickle.dump(export_objects(torch.ones(4), torch.device('cpu')), sys.stdout.buffer)"
    )

    exported: ExportedObjects = pickle.loads(subprocess.check_output([sys.executable, "-c", code]))
    with pytest.raises(RuntimeError, match="is gone"):
        map_objects(exported, CPU)


# --- the decode worker's end ------------------------------------------------------------------------------


def taken(pool: PagePool, pages: int = 2) -> RequestPages:
    return RequestPages(pool=pool, table=pool.allocate(pages), held_tokens=0)


async def test_ended_request_keeps_its_pages_until_the_stage_closes_them() -> None:
    pool, writers, stage = PagePool(4), PageWriters("m"), sleeper()
    try:
        pages, one = taken(pool), writer(stage.pid)
        assert writers.open(one, pages) == (0, 1)
        pages.end()
        assert pool.used == 2
        writers.close(replace(one, attempt=1))
        assert pool.used == 2
        writers.close(one)
        assert pool.used == 0 and pages.freed.is_set()
        writers.close(one)  # does nothing
    finally:
        stage.kill()
        stage.wait()


async def test_stage_death_closes_only_the_pages_it_was_writing() -> None:
    pool, writers, stages = PagePool(6), PageWriters("m"), [sleeper(), sleeper()]
    try:
        requests = [taken(pool), taken(pool), taken(pool)]
        for number, (pages, stage) in enumerate(zip(requests, (*stages, stages[0]), strict=True)):
            writers.open(writer(stage.pid, request_id=str(number)), pages)
            pages.end()
        stages[0].kill()
        async with asyncio.timeout(120):
            await asyncio.gather(requests[0].freed.wait(), requests[2].freed.wait())
        assert not requests[1].freed.is_set() and pool.used == 2
    finally:
        for stage in stages:
            stage.kill()
            stage.wait()


async def test_resume_waits_until_the_old_stage_stops_writing() -> None:
    stage = sleeper()
    try:
        writers, pages = PageWriters("m"), taken(PagePool(4))
        writers.open(writer(stage.pid), pages)
        waiting = asyncio.ensure_future(pages.unused())
        await asyncio.sleep(0)
        assert not waiting.done()
        stage.kill()
        async with asyncio.timeout(120):
            await waiting
    finally:
        stage.kill()
        stage.wait()


async def test_refuses_to_open_pages_for_a_stage_that_maps_other_memory() -> None:
    pool, writers, stage = PagePool(4), PageWriters("m"), sleeper()
    try:
        pages = taken(pool)
        with pytest.raises(DecodeFailed, match="one container of one host"):
            writers.open(writer(stage.pid, home="elsewhere"), pages)
        with pytest.raises(OtherMemory, match="another decode worker's memory"):
            writers.open(writer(stage.pid, memory="n"), pages)
        writers.open(writer(stage.pid), pages)
        with pytest.raises(DecodeFailed, match="before"):
            writers.open(writer(stage.pid), pages)
        pages.end()
        writers.close(writer(stage.pid))
        with pytest.raises(DecodeFailed, match="has ended"):
            writers.open(writer(stage.pid), pages)
        assert pool.used == 0
    finally:
        stage.kill()
        stage.wait()


# --- the stage's end --------------------------------------------------------------------------------------


class Device:
    """Marks that are passed when the test says so."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        assert self.passed


class Opener(ActorOutbox):
    """An outbox that records messages and sends none."""

    def __init__(self) -> None:
        self.sent: list[KVAnnouncement] = []
        self.closed: list[PageWriter] = []
        self.states: list[HandedState] = []

    def open_pages(self, decode_worker: str, writer: PageWriter) -> OpenedPages:
        return OpenedPages(pages=(3, 1), states={32: (5,), 40: (7, 2)})

    def close_pages(self, decode_worker: str, writer: PageWriter) -> None:
        self.closed.append(writer)

    def send_kv(self, delivery: Any, announcement: KVAnnouncement) -> None:
        self.sent.append(announcement)

    def send_state(self, delivery: Any, message: HandedState) -> None:
        self.states.append(message)

    def check(self, delivery: Any) -> None: ...

    def unanswered(self, delivery: Any) -> bool:
        return False


def test_mapped_stage_announces_a_chunk_once_and_copies_no_kv() -> None:
    opener = Opener()
    stream = MappedSender(Neighbours(), "m", opener, background=False).open(
        Destination(request_id="a", decode_worker="decode:x", pages=())
    )
    assert stream.pages == (3, 1) and stream.has_prefix
    kv = torch.ones(20, HEADS, DIM)
    for start in (0, 20):
        moved = [stream.put(layer, start, kv, kv) for layer in LAYERS]
        assert moved == [0, 0]
        assert len(opener.sent) == start // 20, "not before the chunk is computed"
        stream.end_chunk()()
    chunks = [(a.layer, a.layers, a.start, a.tokens, a.payload) for a in opener.sent]
    assert chunks == [(2, 2, 0, 20, None), (2, 2, 20, 20, None)]
    assert stream.close() and len(opener.closed) == 1


def test_mapped_stage_writes_states_into_the_requests_slots() -> None:
    opener, theirs, own = Opener(), states(8), states(2)
    own.conv_SLWE[1], own.recurrent_SLHKD[1] = 3.0, 4.0
    stream = MappedSender(Neighbours(), "m", opener, background=False, states=theirs).open(
        Destination(request_id="a", decode_worker="decode:x", state_places=(32, 40))
    )
    assert stream.copy_state(40, own, 1) is None
    stream.put_state(40, (2, 3), None)
    written = [
        bool((theirs.conv_SLWE[s] == 3).all() and (theirs.recurrent_SLHKD[s] == 4).all()) for s in range(8)
    ]
    assert [slot for slot in range(8) if written[slot]] == [2, 7]
    assert not theirs.conv_SLWE[[0, 1, 3, 4, 5, 6]].any()
    assert [(m.tokens, m.layers, m.arrays, m.bytes) for m in opener.states] == [(40, (2, 3), (), 0)]
    other = LinearStates((2,), (3, 4), (2, 4, 4), 1, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="does not fit"):
        stream.copy_state(40, other, 0)


def states(slots: int) -> LinearStates:
    return LinearStates((2, 3), (3, 4), (2, 4, 4), slots, torch.float32, torch.device("cpu"))


def test_stage_exits_if_the_decode_worker_it_maps_was_replaced() -> None:
    """Otherwise the stage would write KV to memory that no worker reads, and the answer would use stale
    pages."""

    class Other(Opener):
        def open_pages(self, decode_worker: str, writer: PageWriter) -> OpenedPages:
            raise OtherMemory(f"not {writer.memory}")

    ended: list[str] = []
    sender = MappedSender(Neighbours(), "m", Other(), background=False, end=ended.append)
    with pytest.raises(HandoffError, match="not m"):
        sender.open(Destination(request_id="a", decode_worker="decode:y"))
    assert ended == ["not m"]


def test_pages_close_once_after_the_device_has_finished_writing() -> None:
    device, closed = Device(), list[bool]()
    export = MappedExport(lambda: device, lambda: closed.append(True))
    assert not export.revoke() and not export.revoke() and not closed
    device.passed = True
    assert export.revoke() and export.revoke() and closed == [True]


async def test_mapped_kv_counts_as_arrived_once_announced_without_a_copy() -> None:
    pages = taken(PagePool(4))
    changed: Callable[[], None] = lambda: None  # noqa: E731
    inbox = KVInbox(KVArrival(range(4), 32), pages, changed)
    everything = KVAnnouncement(request_id="a", layer=0, start=0, tokens=32, payload=None, layers=4)
    assert await inbox.receive(everything, MappedReader()) == 0
    assert inbox.complete and not inbox.lost


async def test_refuses_kv_of_another_transport() -> None:
    inbox = KVInbox(KVArrival(range(4), 32), taken(PagePool(4)), lambda: None)
    copied = KVAnnouncement(request_id="a", layer=0, start=0, tokens=32, payload=("k", "v"), layers=4)
    with pytest.raises(HandoffError, match="lies elsewhere"):
        await inbox.receive(copied, MappedReader())
    assert inbox.lost and not inbox.complete
