"""Pages that a stage lends to decode workers: what is copied, when pages are given back, and what a death on
either side costs. The device is a stand-in: tensors of this process, behind handles; so is Ray."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from deltafront.workers.kv.actor_post import ActorPost
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.cuda_ipc import CudaIpcLender, CudaIpcReceiver, MappedKV
from deltafront.workers.kv.handoff import HandoffError
from deltafront.workers.kv.page_pool import row_runs
from deltafront.workers.kv.peer_memory import CudaPeerMemory, home
from deltafront.workers.kv.posting import PostingSender
from deltafront.workers.kv.transports import receiver, sender
from deltafront.workers.messages.stages import KVAnnouncement
from deltafront.workers.settings import HandoffConfig

from .test_object_store import FakeRay

HEADS, DIM = 2, 8


class Neighbours:
    """A host's memory and processes. What is mapped is a view, as on a GPU."""

    def __init__(self) -> None:
        self.home = "a host"
        self.exported: dict[int, torch.Tensor] = {}
        self.opened: list[int] = []
        self.gone: dict[int, list[Callable[[], None]]] = {}
        self.dead = False

    def export(self, x: torch.Tensor) -> int:
        self.exported[len(self.exported)] = x
        return len(self.exported) - 1

    def open(self, handle: int) -> torch.Tensor:
        if self.dead:
            raise RuntimeError("invalid resource handle\nand a traceback")
        self.opened.append(handle)
        return self.exported[handle][:]

    def mark(self) -> None:
        """All is computed at once."""

    def when_gone(self, pid: int, tell: Callable[[], None]) -> None:
        self.gone.setdefault(pid, []).append(tell)

    def end(self, pid: int) -> None:
        self.dead = True
        for tell in self.gone.pop(pid):
            tell()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A stage's cache, its sender, and a decode worker's end; `deliver` is the way between."""

    def __init__(self, hold_s: float = 60.0) -> None:
        self.peers, self.clock, self.ray = Neighbours(), Clock(), FakeRay()
        self.stage = PagedKVCache(range(3, 6), HEADS, DIM, 20, torch.float32, "cpu")
        self.worker = PagedKVCache(range(8), HEADS, DIM, 30, torch.float32, "cpu")
        post = ActorPost(1 << 20, hold_s, self.clock)
        post._ray = self.ray
        self.lender = CudaIpcLender(self.stage, self.peers, hold_s, self.clock)
        self.sender = PostingSender(self.lender, post, background=False)
        self.thread = ThreadPoolExecutor(1)
        self.receiver = CudaIpcReceiver(self.worker, self.thread, self.peers, self.clock)

    def announce(self, pages: Sequence[int], start: int, tokens: int, name: str = "r") -> dict[int, Any]:
        """Write a chunk into the stage's pages and announce it, layer by layer."""
        made = {}
        for layer in self.stage.layers:
            k, v = torch.randn(2, tokens, HEADS, DIM)
            self.stage.write(layer, torch.tensor(pages), start, k, v)
            size = self.sender.announce(name, "decode:x", layer, start, k, v, pages)
            assert size == 2 * tokens * HEADS * DIM * 4
            made[layer] = k, v
        self.sender.end_chunk(name)()
        return made

    async def deliver(self, message: KVAnnouncement, pages: Sequence[int] | None) -> int:
        @contextmanager
        def hold() -> Iterator[Sequence[int] | None]:
            yield pages

        layers = range(message.layer, message.layer + message.layers)
        return await self.receiver.receive(message, layers, hold)

    def taken(self, pages: Sequence[int], layer: int, tokens: int) -> tuple[torch.Tensor, ...]:
        k, v = self.worker.gather(layer, torch.tensor(pages), tokens)
        return k.transpose(0, 1), v.transpose(0, 1)


@pytest.mark.parametrize("theirs", [tuple(range(2, 9)), (9, 10, 3, 4, 0, 15, 16)], ids=["run", "scattered"])
@pytest.mark.parametrize("ours", [tuple(range(5, 12)), (20, 3, 4, 29, 1, 0, 7)], ids=["run", "scattered"])
async def test_chunks_arrive_whatever_pages_they_lie_in(
    theirs: tuple[int, ...], ours: tuple[int, ...]
) -> None:
    bench = Bench()
    chunks = [bench.announce(theirs, 0, 64), bench.announce(theirs, 64, 37)]
    for message in bench.ray.sent:
        moved = await bench.deliver(message, ours)
        assert moved == 3 * 2 * message.tokens * HEADS * DIM * 4
    for layer in bench.stage.layers:
        wanted = [torch.cat(sides) for sides in zip(*(chunk[layer] for chunk in chunks), strict=True)]
        assert all(map(torch.equal, bench.taken(ours, layer, 101), wanted))
    for layer in set(bench.worker.layers) - set(bench.stage.layers):
        assert not bool(bench.worker.layer(layer)[0].any()), "nothing else was written"
    assert len(bench.ray.sent) == 2, "the layers of a chunk travel together"
    assert bench.peers.opened == [0, 1], "mapped once"


def test_rows_of_pages_are_joined_into_runs() -> None:
    assert row_runs((4, 5, 6), 0, 48) == ((64, 48),)
    assert row_runs((4, 5, 9), 10, 30) == ((74, 22), (144, 8))
    for seed in range(50):
        rng = random.Random(seed)
        pages = rng.sample(range(12), 6)
        start = rng.randrange(90)
        tokens = rng.randrange(1, 97 - start)
        runs = row_runs(pages, start, tokens)
        rows = [row for first, count in runs for row in range(first, first + count)]
        assert rows == [16 * pages[t // 16] + t % 16 for t in range(start, start + tokens)]
        assert all(sum(a) != b[0] for a, b in itertools.pairwise(runs))
    for start, tokens in ((-1, 2), (0, 0), (90, 7)):
        with pytest.raises(ValueError, match="are not in 6 pages"):
            row_runs(range(6), start, tokens)


# --- when pages are free --------------------------------------------------------------------------------


def test_pages_are_held_until_every_announcement_is_answered() -> None:
    bench = Bench()
    for name, pages in (("r", range(4)), ("other", range(4, 8))):
        bench.announce(pages, 0, 32, name)
        bench.announce(pages, 32, 32, name)
        bench.sender.forget(name)
    assert bench.sender.holds("r") and bench.sender.holds("other")
    bench.ray.answered |= {0, 2}
    assert bench.sender.holds("r")
    bench.ray.answered |= {1}
    assert not bench.sender.holds("r") and bench.sender.holds("other")
    assert not bench.sender.holds("unknown")


def test_a_dead_decode_worker_lets_go_at_once_and_a_silent_one_in_time() -> None:
    bench = Bench(hold_s=30.0)
    bench.announce(range(4), 0, 32, "dead")
    bench.announce(range(4, 8), 0, 32, "silent")
    bench.ray.errors[0] = RuntimeError("the actor died")
    bench.ray.answered.add(0)
    assert not bench.sender.holds("dead")
    with pytest.raises(HandoffError, match=r"decode:x did not take K/V: RuntimeError: the actor died"):
        bench.sender.end_chunk("dead")()
    bench.clock.now += 29.9
    assert bench.sender.holds("silent")
    bench.clock.now += 0.2
    assert not bench.sender.holds("silent")
    with pytest.raises(HandoffError, match="decode:x did not take K/V"):
        bench.sender.end_chunk("silent")()


async def test_what_was_read_after_its_time_is_not_taken() -> None:
    """Else a page that the stage has given away meanwhile could pass for the request's."""
    bench = Bench(hold_s=30.0)
    bench.announce(range(4), 0, 32)
    (message,) = bench.ray.sent
    bench.clock.now += 30.0
    with pytest.raises(HandoffError, match=r"K/V of r, layers 3 \.\. 5 at 0 was read too late"):
        await bench.deliver(message, range(2))
    assert not bench.sender.holds("r"), "the same clock says so on both sides"


def test_no_order_of_events_frees_a_page_that_may_be_read() -> None:
    """Announcements, answers, failures and time in any order: `holds` is exactly what is still owed."""
    for seed in range(60):
        rng = random.Random(seed)
        bench = Bench(hold_s=10.0)
        owed: dict[int, tuple[str, float]] = {}
        for _ in range(40):
            event = rng.choice(("announce", "answer", "fail", "wait", "forget"))
            name = rng.choice("ab")
            if event == "announce" and not failed(bench, name):
                bench.sender.announce(name, "decode:x", 3, 0, *torch.zeros(2, 16, HEADS, DIM), (1,))
                bench.sender._post_message()
                owed[len(bench.ray.sent) - 1] = name, bench.clock.now + 10.0
            elif event in ("answer", "fail") and owed:
                number = rng.choice(sorted(owed))
                del owed[number]
                bench.ray.answered.add(number)
                if event == "fail":
                    bench.ray.errors[number] = RuntimeError("no")
            elif event == "wait":
                bench.clock.now += rng.choice((0.5, 4.0))
            elif event == "forget":
                bench.sender.forget(name)
            owed = {n: (who, until) for n, (who, until) in owed.items() if until > bench.clock.now}
            for one in "ab":
                assert bench.sender.holds(one) == (one in {who for who, _ in owed.values()}), (seed, event)


def failed(bench: Bench, name: str) -> bool:
    try:
        bench.sender.end_chunk(name)()
    except HandoffError:
        return True
    return False


def test_what_the_posting_thread_has_not_sent_yet_is_held() -> None:
    bench = Bench()
    begun = PostingSender(bench.lender, bench.sender._post, background=True)
    computed = Event()
    bench.peers.mark = lambda: computed  # type: ignore[method-assign, return-value]
    begun.announce("r", "decode:x", 3, 0, *torch.zeros(2, 16, HEADS, DIM), (1,))
    sent = begun.end_chunk("r")
    begun.forget("r")
    assert begun.holds("r") and not bench.ray.sent
    computed.happened.set()
    sent()
    assert begun.holds("r") and len(bench.ray.sent) == 1
    bench.ray.answered.add(0)
    assert not begun.holds("r")


# --- what cannot be read --------------------------------------------------------------------------------


async def test_a_dead_stage_fails_what_it_announced_and_is_unmapped() -> None:
    bench = Bench()
    bench.announce(range(4), 0, 32)
    (message,) = bench.ray.sent
    await bench.deliver(message, range(2))
    assert bench.receiver._mapped
    bench.peers.end(message.payload.cache.pid)
    assert not bench.receiver._mapped, "its memory is not kept from the next stage"
    with pytest.raises(HandoffError, match=r"cannot be reached: RuntimeError: invalid resource handle$"):
        await bench.deliver(message, range(2))


async def test_a_request_that_is_over_reads_nothing() -> None:
    bench = Bench()
    bench.announce(range(4), 0, 32)
    assert await bench.deliver(bench.ray.sent[0], None) == 0
    assert bench.peers.opened == []


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "host": ({"home": "elsewhere"}, {}, r"on another host .*elsewhere; here: a host.*: use nixl or object_store"),
    "dtype": ({"dtype": "torch.float16"}, {}, r"in pages of \(16, 2, 8\) torch.float16, expected"),
    "heads": ({"shape": (3, 20, 16, 4, 8)}, {}, r"in pages of \(16, 4, 8\)"),
    "layers": ({"layers": range(4)}, {}, r"is not what the stage holds: range\(0, 4\)"),
    "rows": ({}, {"rows": ((0, 31),)}, "31 rows"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_what_cannot_be_read_is_refused_plainly(case: str) -> None:
    bench = Bench()
    bench.announce(range(4), 0, 32)
    lent, kv, message = WRONG[case]
    payload: MappedKV = bench.ray.sent[0].payload
    wrong = replace(payload, cache=replace(payload.cache, **lent), **kv)
    with pytest.raises(HandoffError, match=message):
        await bench.deliver(replace(bench.ray.sent[0], payload=wrong), range(2))
    with pytest.raises(HandoffError, match="is tuple, not pages"):
        await bench.deliver(replace(bench.ray.sent[0], payload=()), range(2))
    assert bench.peers.opened == []


def test_it_needs_a_gpu() -> None:
    cache = PagedKVCache(range(1), HEADS, DIM, 2, torch.float32, "cpu")
    for end in (lambda: sender(CONFIG, cache), lambda: receiver(CONFIG, cache, ThreadPoolExecutor(1))):
        with pytest.raises(ValueError, match="CUDA IPC needs a GPU, not cpu"):
            end()
    assert home() == home() and "pid:" in home()


CONFIG = HandoffConfig(transport="cuda_ipc")


async def test_the_end_of_a_process_is_noticed() -> None:
    """Of a child, and of one that is gone already."""
    memory = CudaPeerMemory.__new__(CudaPeerMemory)
    child = await asyncio.create_subprocess_exec("sleep", "60")
    gone = asyncio.Event()
    memory.when_gone(child.pid, gone.set)
    await asyncio.sleep(0)
    assert not gone.is_set()
    child.kill()
    await asyncio.wait_for(gone.wait(), 20)
    await child.wait()
    gone.clear()
    memory.when_gone(child.pid, gone.set)
    await asyncio.wait_for(gone.wait(), 20)


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")
def test_cuda_memory_is_read_by_another_process() -> None:
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
    process.join(20)


def _read(pipe: Any) -> None:
    memory = CudaPeerMemory(torch.device("cuda"))
    opened = memory.open(pipe.recv())
    pipe.send(opened.sum().item())
    pipe.recv()
    pipe.send(opened.sum().item())
    del opened


class Event:
    """A CUDA event, as far as it is waited for."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def synchronize(self) -> None:
        assert self.happened.wait(20)
