"""Tests pages that a stage exports to decode workers, with every transport that reads them directly: the KV
that arrives, and when pages are free."""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from deltafront.workers.kv.handoff import exported_pages
from deltafront.workers.kv.handoff.exported_pages import ExportedKV
from deltafront.workers.kv.handoff.protocols import Destination, HandoffError
from deltafront.workers.kv.handoff.stream import MessageSender
from deltafront.workers.kv.pages.pool import paired_runs, row_runs

from .export_bench import DIM, HEADS, Bench, ByCudaIpc, ByNixl, Way


@pytest.fixture(params=[ByCudaIpc, ByNixl])
def way(request: pytest.FixtureRequest) -> Way:
    made: Way = request.param()
    return made


@pytest.mark.parametrize("theirs", [tuple(range(2, 9)), (9, 10, 3, 4, 0, 15, 16)], ids=["run", "scattered"])
@pytest.mark.parametrize("ours", [tuple(range(5, 12)), (20, 3, 4, 29, 1, 0, 7)], ids=["run", "scattered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_chunks_arrive_from_contiguous_and_scattered_pages(
    way: Way, theirs: tuple[int, ...], ours: tuple[int, ...], dtype: torch.dtype
) -> None:
    bench = Bench(way, dtype=dtype)
    chunks = [bench.announce(theirs, 0, 64), bench.announce(theirs, 64, 37)]
    for message in bench.ray.sent:
        moved = await bench.deliver(message, ours)
        assert moved == 3 * 2 * message.tokens * HEADS * DIM * dtype.itemsize
    for layer in bench.stage.layers:
        wanted = [torch.cat(sides) for sides in zip(*(chunk[layer] for chunk in chunks), strict=True)]
        assert all(map(torch.equal, bench.taken(ours, layer, 101), wanted))
    assert bench.written() == 2 * 3 * 101, "nothing else was written"
    assert len(bench.ray.sent) == 2, "the layers of a chunk travel together"


def test_contiguous_pages_are_joined_into_runs() -> None:
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


def test_splits_row_runs_where_either_cache_is_not_contiguous() -> None:
    assert list(paired_runs([(64, 48)], [(0, 16), (32, 32)])) == [(64, 0, 16), (80, 32, 32)]
    for seed in range(50):
        rng = random.Random(seed)
        theirs, ours = (row_runs(rng.sample(range(12), 6), rng.randrange(16), 70) for _ in "ab")
        pairs = list(paired_runs(theirs, ours))
        for side, runs in ((0, theirs), (1, ours)):
            rows = [pair[side] + n for pair in pairs for n in range(pair[2])]
            assert rows == [row for first, count in runs for row in range(first, first + count)]
        assert len(pairs) < len(theirs) + len(ours), "no more pieces than there are ends"


def test_runs_of_a_chunk_are_computed_once_for_all_layers(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another chunk, or a request with other pages, gets its own runs."""
    bench, asked = Bench(way), []

    def counted(*arguments: Any) -> Any:
        asked.append(arguments[:3])
        return row_runs(*arguments)

    monkeypatch.setattr(exported_pages, "row_runs", counted)
    kv, pages = torch.zeros(2, 16, HEADS, DIM), (3, 1)
    for start in (0, 16):
        for layer in bench.stage.layers:
            bench.stream("r", pages).put(layer, start, *kv)
        bench.stream("r", pages).end_chunk()
    bench.stream("other", (5, 2)).put(bench.stage.layers[0], 16, *kv)
    bench.stream("other", (5, 2)).end_chunk()
    assert asked == [(pages, 0, 16), (pages, 16, 16), ((5, 2), 16, 16)]
    rows = [message.payload.rows for message in bench.ray.sent]
    assert rows == [((48, 16),), ((16, 16),), ((32, 16),)]


# --- when pages are free ----------------------------------------------------------------------------------


def test_pages_are_held_until_every_announcement_is_answered(way: Way) -> None:
    bench = Bench(way)
    for name, pages in (("r", range(4)), ("other", range(4, 8))):
        bench.announce(pages, 0, 32, name)
        bench.announce(pages, 32, 32, name)
    assert bench.in_use("r") and bench.in_use("other")
    bench.ray.answered |= {0, 2}
    assert bench.in_use("r")
    bench.ray.answered |= {1}
    assert not bench.in_use("r") and bench.in_use("other")


def test_pages_are_freed_when_a_decode_worker_dies_or_its_lease_ends(way: Way) -> None:
    bench = Bench(way, lease_s=30.0)
    bench.announce(range(4), 0, 32, "dead")
    bench.announce(range(4, 8), 0, 32, "silent")
    bench.ray.errors[0] = RuntimeError("the actor died")
    bench.ray.answered.add(0)
    dead, silent = bench.streams["dead"], bench.streams["silent"]
    with pytest.raises(HandoffError, match=r"decode:x did not take KV: RuntimeError: the actor died"):
        dead.end_chunk()()
    assert not bench.in_use("dead")
    bench.clock.now += 29.9
    assert bench.in_use("silent")
    bench.clock.now += 0.2
    with pytest.raises(HandoffError, match="decode:x did not take KV"):
        silent.end_chunk()()
    assert not bench.in_use("silent")


async def test_kv_copied_after_its_pages_were_reused_is_discarded(way: Way) -> None:
    """Otherwise a decode worker that was paused for long could use another request's KV."""
    bench = Bench(way, lease_s=30.0)
    bench.announce(range(4), 0, 32)
    bench.announce(range(4, 8), 0, 32, "other")
    late, good = bench.ray.sent
    bench.ray.answered.add(1)
    await bench.deliver(good, range(4, 6))
    bench.clock.now += 30.0
    assert not bench.in_use("r")
    bench.announce(range(4), 0, 32, "next")
    with pytest.raises(HandoffError, match=r"KV of r, layers 3 \.\. 5 at 0 was read too late"):
        await bench.deliver(late, range(2))
    await bench.deliver(bench.ray.sent[-1], range(2))


PAGE = {"a": 1, "b": 2}


def test_page_is_never_freed_while_a_decode_worker_may_copy_it(way: Way) -> None:
    """Announcements, answers, failures and time come in any order. Pages stay in use while an answer is
    missing."""
    for seed in range(60):
        rng = random.Random(seed)
        bench = Bench(way, lease_s=10.0)
        owed: dict[int, tuple[str, float]] = {}
        for _ in range(40):
            event = rng.choice(("announce", "answer", "fail", "wait"))
            name = rng.choice("ab")
            if event == "announce" and not failed(bench, name):
                bench.stream(name, (PAGE[name],)).put(3, 0, *torch.zeros(2, 16, HEADS, DIM))
                bench.stream(name, (PAGE[name],)).end_chunk()
                owed[len(bench.ray.sent) - 1] = name, bench.clock.now + 10.0
            elif event in ("answer", "fail") and owed:
                number = rng.choice(sorted(owed))
                del owed[number]
                bench.ray.answered.add(number)
                if event == "fail":
                    bench.ray.errors[number] = RuntimeError("no")
            elif event == "wait":
                bench.clock.now += rng.choice((0.5, 4.0))
            owed = {n: (who, until) for n, (who, until) in owed.items() if until > bench.clock.now}
            for one in [*bench.streams]:
                assert bench.in_use(one) == (one in {who for who, _ in owed.values()}), (seed, event)


def failed(bench: Bench, name: str) -> bool:
    if name not in bench.streams:
        return False
    try:
        bench.streams[name].end_chunk()()
    except HandoffError:
        return True
    return False


def test_pages_stay_allocated_until_their_announcement_is_sent(way: Way) -> None:
    bench = Bench(way)
    background = MessageSender(bench.exporter, bench.outbox, background=True)
    stream = background.open(Destination(request_id="r", decode_worker="decode:x", pages=(1,)))
    computed = Event()
    stream._export._mark = lambda: computed  # type: ignore[attr-defined]
    stream.put(3, 0, *torch.zeros(2, 16, HEADS, DIM))
    sent = stream.end_chunk()
    assert not stream.close() and not bench.ray.sent
    computed.happened.set()
    sent()
    assert not stream.close() and len(bench.ray.sent) == 1
    bench.ray.answered.add(0)
    assert stream.close()


# --- refusals ---------------------------------------------------------------------------------------------


async def test_no_kv_is_copied_for_an_ended_request(way: Way) -> None:
    bench = Bench(way)
    bench.announce(range(4), 0, 32)
    assert await bench.deliver(bench.ray.sent[0], None) is None
    assert not way.touched and not bench.written()


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dtype": ({"dtype": "torch.float16"}, {}, r"in pages of \(16, 2, 8\) torch.float16, expected"),
    "heads": ({"shape": (3, 20, 16, 4, 8)}, {}, r"in pages of \(16, 4, 8\)"),
    "layers": ({"layers": range(4)}, {}, r"is not what the stage holds: range\(0, 4\)"),
    "rows": ({}, {"rows": ((0, 31),)}, "31 rows"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_refuses_pages_that_cannot_be_copied_with_the_reason(way: Way, case: str) -> None:
    bench = Bench(way)
    bench.announce(range(4), 0, 32)
    exported, kv, message = WRONG[case]
    payload: ExportedKV = bench.ray.sent[0].payload
    wrong = replace(payload, cache=replace(payload.cache, **exported), **kv)
    with pytest.raises(HandoffError, match=message):
        await bench.deliver(replace(bench.ray.sent[0], payload=wrong), range(2))
    with pytest.raises(HandoffError, match="is tuple, not pages"):
        await bench.deliver(replace(bench.ray.sent[0], payload=()), range(2))
    assert not way.touched and not bench.written()


class Event:
    """Stands in for a CUDA event that is waited for."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def synchronize(self) -> None:
        assert self.happened.wait(60)
