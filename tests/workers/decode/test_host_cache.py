"""Tests that a decode worker gives the same answers with KV from host memory as with KV in its pages."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from deltafront.workers.kv.pages import host_tier
from deltafront.workers.kv.pages.host_tier import Runs
from deltafront.workers.messages.events import FinishReason
from deltafront.workers.messages.requests import DecodeFailed, GenerateJob, KeepSession, Reservation, Reserved
from deltafront.workers.messages.stages import KVRange, PageWriter

from ..conftest import LAYERS, Bench
from ..keys import key_of
from .test_decode_engine import GREEDY, NEW, expected, prompt
from .test_remembered import DOCUMENT, Expected, found, go_on, read

__all__ = ["expected"]
ROOM = {"cache_tokens": 24 * 16, "host_cache_gib": 0.02}


async def copied(run: Bench) -> None:
    host = run.engine._manager.host
    assert host is not None
    while host.busy:
        await asyncio.sleep(0.001)


async def push_out(run: Bench) -> None:
    """Evict the cached pages: another prompt takes all pages."""
    await copied(run)
    await run.reserve("big", 300, 84)
    await run.engine.cancel("big")
    assert not len(run.engine._manager.pool.prefix_cache)


def slots_used(run: Bench) -> int:
    host = run.engine._manager.host
    return 0 if host is None else host.pool.used


@pytest.mark.parametrize("length", sorted({16 * page + by for page in (8, 9) for by in (-1, 0, 1)}))
async def test_prefix_from_host_memory_gives_the_same_answer(
    bench: Any, expected: Expected, length: int
) -> None:
    run = await bench(**ROOM)
    ids = prompt(length)
    await read(run, "first", ids)
    await push_out(run)
    assert await found(run, ids) == length // 16 * 16
    held = (length - 1) // 16 * 16
    assert (await go_on(run, "again", ids, held)).ids == expected(ids)
    pages, slots, _exact = run.engine._manager.find(key_of(ids))
    assert (len(pages), slots) == (length // 16, ()), "it is on the GPU again"
    await copied(run)
    assert (run.used, slots_used(run)) == (0, 0)


async def test_host_memory_completes_a_prefix_that_is_partly_on_the_gpu(
    bench: Any, expected: Expected
) -> None:
    run = await bench(**ROOM)
    await read(run, "first", DOCUMENT)
    await copied(run)
    await run.reserve("half", 270, 2)
    await run.engine.cancel("half")
    pages, slots, exact = run.engine._manager.find(key_of(DOCUMENT))
    assert pages and slots and exact and len(pages) + len(slots) == 9
    reserved = await run.reserve("again", 6, NEW, key=key_of(DOCUMENT), prefix_tokens=144, reads_rest=True)
    assert (reserved.held_tokens, reserved.host_tokens) == (144, len(slots) * 16)
    await run.engine.cancel("again")
    assert (await go_on(run, "once more", DOCUMENT, 144)).ids == expected(list(DOCUMENT))


async def test_group_prefills_the_rest_after_a_prefix_from_host_memory(
    bench: Any, expected: Expected
) -> None:
    run = await bench(**ROOM)
    await read(run, "first", DOCUMENT)
    await push_out(run)
    ids = [*DOCUMENT, *prompt(80, seed=3)]
    await run.reserve("longer", len(ids) - 128, NEW, key=key_of(ids), prefix_tokens=128)
    whole = run.prefill(ids)
    late = [piece for piece in run.pieces("longer", whole) if piece.start >= 128]
    await asyncio.gather(*(run.engine.announce(piece) for piece in late))
    await run.deliver_logits("longer", whole)
    answer = await run.collect(GenerateJob(request_id="longer", sampling=GREEDY))
    assert answer.ids == expected(ids) and await found(run, ids) == len(ids) // 16 * 16


async def test_several_requests_at_once_get_their_prefixes_from_host_memory(
    bench: Any, expected: Expected
) -> None:
    run = await bench(cache_tokens=40 * 16, host_cache_gib=0.02)
    await read(run, "first", DOCUMENT)
    await copied(run)
    await run.reserve("big", 600, 40)
    await run.engine.cancel("big")
    prompts = [[*DOCUMENT, *prompt(20, seed=seed)] for seed in (1, 2)]
    answers = await asyncio.gather(*(go_on(run, f"q{n}", ids, 144) for n, ids in enumerate(prompts)))
    assert [answer.ids for answer in answers] == [expected(ids) for ids in prompts]
    await copied(run)
    assert (run.used, slots_used(run)) == (0, 0)


class SlowCopies:
    """Copies KV back one layer at a time, when the test says so. Unwritten pages are NaN, so that a layer
    that is read before its copy makes the test fail."""

    def __init__(self, run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_tier, "BATCH_PAGES", 1)
        self.run, self.runner, self.host = run, run.engine._runner, run.engine._manager.host
        self.moved: list[range] = []
        self.parts: list[range] = []
        """Layers of each prefill step."""
        self._may, self._move, self._append = asyncio.Semaphore(0), self.host._move, self.runner.append
        self._gather = self.runner.cache.gather
        caches = [self.runner.cache, *(rank._runner.cache for rank in run.engine._ranks)]  # type: ignore[attr-defined]
        for side in (side for cache in caches for side in cache.sides):
            side[:, : self.runner.scratch_page] = float("nan")
        self.host._move = self.move
        monkeypatch.setattr(self.runner.cache, "gather", self.gather)
        monkeypatch.setattr(self.runner, "append", self.append)

    def go_on(self, layers: int = LAYERS) -> None:
        for _ in range(layers):
            self._may.release()

    async def move(self, runs: Runs, layers: range, back: bool) -> None:
        if back:
            await self._may.acquire()
        await self._move(runs, layers, back)
        if back:
            self.moved.append(layers)

    def gather(self, layer: int, pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        k_GSD, v_GSD = self._gather(layer, pages, tokens)
        assert k_GSD.isfinite().all() and v_GSD.isfinite().all(), f"layer {layer} was read too early"
        return k_GSD, v_GSD

    def append(self, *arguments: Any) -> Any:
        part = arguments[4]
        self.parts.append(range(LAYERS) if part is None else part.layers)
        return self._append(*arguments)

    async def until_moved(self, layers: int) -> None:
        while len(self.moved) < layers:
            await asyncio.sleep(0.001)


async def pushed_out(run: Bench, monkeypatch: pytest.MonkeyPatch) -> SlowCopies:
    await read(run, "first", DOCUMENT)
    await push_out(run)
    return SlowCopies(run, monkeypatch)


@pytest.mark.parametrize("looks_ahead", [False, True])
async def test_prefill_follows_copies_layer_by_layer_while_others_decode(
    bench: Any, expected: Expected, monkeypatch: pytest.MonkeyPatch, looks_ahead: bool
) -> None:
    run = await bench(cache_tokens=48 * 16, host_cache_gib=0.02, looks_ahead=looks_ahead)
    await read(run, "first", DOCUMENT)
    await copied(run)
    await run.reserve("big", 600, 168)
    await run.engine.cancel("big")
    copies, others = SlowCopies(run, monkeypatch), prompt(50, seed=9)
    answer = expected(others)
    going_on = asyncio.create_task(go_on(run, "again", DOCUMENT, 144))
    for came, parts in enumerate(([], [], [], [3], [3], [3, 5]), start=0):
        await copies.until_moved(came)
        assert (await read(run, f"other {came}", others)).ids == answer
        assert [part.stop for part in copies.parts] == parts
        assert not going_on.done()
        copies.go_on(1)
    assert (await going_on).ids == expected(list(DOCUMENT))
    assert copies.parts == [range(3), range(3, 5), range(5, 6)]
    assert not run.engine._runner._begun and not run.engine._scheduler._begun


@pytest.mark.parametrize("came", [0, 4])
async def test_disconnect_during_a_host_copy_frees_everything(
    bench: Any, monkeypatch: pytest.MonkeyPatch, came: int
) -> None:
    """The pages are freed only after the last copy into them has ended."""
    run = await bench(**ROOM)
    copies = await pushed_out(run, monkeypatch)
    going_on = asyncio.create_task(go_on(run, "again", DOCUMENT, 144))
    copies.go_on(came)
    await copies.until_moved(came)
    while len(copies.parts) < (came > 0) or run.engine._requests.find("again") is None:
        await asyncio.sleep(0.001)
    leaving = asyncio.create_task(run.engine.cancel("again"))
    await asyncio.sleep(0.01)
    assert not leaving.done() and run.used > 0 and slots_used(run) == 9
    copies.go_on()
    await leaving
    assert (await going_on).finish.reason in (FinishReason.CANCELLED, FinishReason.FAILED)
    assert (run.used, slots_used(run)) == (0, 0)
    while run.engine._runner._begun or run.engine._scheduler.running:
        await asyncio.sleep(0.001)
    assert await found(run, DOCUMENT) == 144, "they have come back for the next one"


async def test_stages_fetch_a_layer_only_after_its_copy(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await bench(**ROOM)
    copies = await pushed_out(run, monkeypatch)
    ids = [*DOCUMENT, *prompt(80, seed=3)]
    reserved = await run.reserve("longer", len(ids) - 128, NEW, key=key_of(ids), prefix_tokens=128)
    assert (reserved.host_tokens, copies.moved) == (128, [])
    whole = run.prefill(ids)
    for layer in range(LAYERS):
        wanted = KVRange(request_id="longer", layer=layer, start=16, tokens=100)
        fetched = asyncio.create_task(run.engine.kv(wanted))
        await asyncio.sleep(0.01)
        assert not fetched.done()
        copies.go_on(1)
        kv = await fetched
        for fetched_TGD, whole_TGD in zip((kv.k, kv.v), whole.kv[layer], strict=True):
            np.testing.assert_allclose(fetched_TGD, whole_TGD[16:116], rtol=0, atol=1e-5)
    await run.engine.cancel("longer")


@pytest.mark.parametrize("kept", [False, True])
async def test_prefill_waits_for_layers_still_being_copied(
    bench: Any, expected: Expected, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    run = await bench(**ROOM)
    copies = await pushed_out(run, monkeypatch)
    ids = [*DOCUMENT, *prompt(80, seed=3)]
    given = {"key": key_of(ids), "prefix_tokens": 128, "keep_ttl_s": 60.0}
    await run.reserve("longer", len(ids) - 128, NEW, **given)
    whole = run.prefill(ids)
    late = [piece for piece in run.pieces("longer", whole) if piece.start >= 128]
    await asyncio.gather(*(run.engine.announce(piece) for piece in late))
    await run.deliver_logits("longer", whole)
    copies.go_on(LAYERS - 1)
    await copies.until_moved(LAYERS - 1)
    if kept:
        keeping = asyncio.create_task(run.engine.keep(KeepSession(request_id="longer")))
        await asyncio.sleep(0.01)
        assert not keeping.done()
        copies.go_on(1)
        session = (await keeping).session.session_id
        answer = await run.ask_session("asked", session, [5], GREEDY)
        assert answer.ids == expected([*ids, 5])
        assert await run.engine.release_session(session, "me")
        return
    answering = asyncio.create_task(run.collect(GenerateJob(request_id="longer", sampling=GREEDY)))
    await asyncio.sleep(0.01)
    assert run.engine._scheduler.submitted == 0
    copies.go_on(1)
    assert (await answering).ids == expected(ids)


async def test_reservation_waits_for_copies_into_pages_that_stages_map(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise stages that map the pages would wait for the copies in the middle of a prefill."""
    run = await bench(**ROOM)
    copies = await pushed_out(run, monkeypatch)
    run.engine._tiers._in_place = True
    given = {"key": key_of(DOCUMENT), "owner": "me"}
    rest = Reservation(request_id="rest", new_tokens=22, max_tokens=NEW, prefix_tokens=128, **given)
    reserving = asyncio.create_task(run.engine.reserve(rest))
    copies.go_on(LAYERS - 1)
    await copies.until_moved(LAYERS - 1)
    assert not reserving.done()
    copies.go_on(1)
    assert (await reserving).host_tokens == 128
    await run.engine.cancel("rest")


async def test_stage_gets_a_page_table_only_after_the_copies(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await bench(**ROOM)
    copies = await pushed_out(run, monkeypatch)
    await run.reserve("rest", 22, NEW, key=key_of(DOCUMENT), prefix_tokens=128)
    monkeypatch.setattr(run.engine._receiver._writers, "open", lambda _writer, pages: pages.table)
    writer = PageWriter(request_id="rest", attempt=0, home="here", pid=1, memory="m")
    opening = asyncio.create_task(run.engine.open_pages(writer))
    copies.go_on(LAYERS - 1)
    await copies.until_moved(LAYERS - 1)
    assert not opening.done()
    copies.go_on(1)
    assert (await opening).pages == run.engine._requests.find("rest").pages.table
    await run.engine.cancel("rest")


@pytest.mark.parametrize("in_place", [False, True])
async def test_failed_copies_mark_the_worker_faulty(
    bench: Any, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """All waiting requests fail, even if a request has already used the first layers."""
    run = await bench(**ROOM)
    run.may_fault = True
    copies = await pushed_out(run, monkeypatch)
    run.engine._tiers._in_place = in_place
    why = "KV did not come back from host memory: no such memory"
    given = {"key": key_of(DOCUMENT), "prefix_tokens": 128, "owner": "me"}
    rest = Reservation(request_id="rest", new_tokens=22, max_tokens=NEW, **given)
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(go_on(run, "again", DOCUMENT, 144))]
    copies.go_on(4)
    await copies.until_moved(4)
    while not copies.parts:
        await asyncio.sleep(0.001)
    tasks.append(asyncio.create_task(run.engine.reserve(rest)))
    while run.engine._requests.find("rest") is None:
        await asyncio.sleep(0.001)

    async def fails(_runs: Runs, _layers: range, _back: bool) -> None:
        raise RuntimeError("no such memory")

    copies._move = fails
    copies.go_on(1)
    answer, reserved = await asyncio.gather(*tasks, return_exceptions=True)
    assert (answer.finish.reason, answer.finish.message) == (FinishReason.FAILED, why)
    if in_place:
        assert isinstance(reserved, DecodeFailed) and str(reserved) == why
    else:
        assert isinstance(reserved, Reserved)
        failed = await run.collect(GenerateJob(request_id="rest", sampling=GREEDY))
        assert (failed.finish.reason, failed.finish.message) == (FinishReason.FAILED, why)
    assert (run.used, slots_used(run)) == (0, 0)
    while run.engine._runner._begun:
        await asyncio.sleep(0.001)
