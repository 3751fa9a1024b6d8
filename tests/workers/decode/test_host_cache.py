"""A decode worker answers prompts from host memory as it would have answered them from its own pages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from deltafront.workers.messages.requests import DecodeFailed, GenerateJob, Reservation

from ..conftest import Bench
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
    """Another prompt takes all pages."""
    await copied(run)
    await run.reserve("big", 300, 84)
    await run.engine.cancel("big")
    assert not len(run.engine._manager.pool.entries)


def slots_used(run: Bench) -> int:
    host = run.engine._manager.host
    return 0 if host is None else host.pool.used


@pytest.mark.parametrize("length", sorted({16 * page + by for page in (8, 9) for by in (-1, 0, 1)}))
async def test_a_prompt_comes_back_the_same_at_every_page_boundary(
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


async def test_what_is_partly_on_the_gpu_is_completed_from_host_memory(
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


async def test_a_group_reads_the_rest_behind_what_came_back(bench: Any, expected: Expected) -> None:
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


async def test_several_at_once_and_two_that_share(bench: Any, expected: Expected) -> None:
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


@pytest.mark.parametrize("gives_up", ["cancels", "goes"])
async def test_a_client_that_leaves_while_pages_come_back_leaves_nothing(bench: Any, gives_up: str) -> None:
    """The pages are given away only when nobody writes to them any more."""
    run = await bench(**ROOM)
    await read(run, "first", DOCUMENT)
    await push_out(run)
    host = run.engine._manager.host
    began, may_go_on, move = asyncio.Event(), asyncio.Event(), host._move

    async def slowly(pages: Sequence[int], slots: Sequence[int], back: bool) -> None:
        began.set()
        await may_go_on.wait()
        await move(pages, slots, back)

    host._move = slowly
    given = {"key": key_of(DOCUMENT), "prefix_tokens": 144, "reads_rest": True, "owner": "me"}
    reservation = Reservation(request_id="again", prompt_tokens=6, max_tokens=NEW, **given)
    reserving = asyncio.create_task(run.engine.reserve(reservation))
    await began.wait()
    leaving = asyncio.create_task(run.engine.cancel("again"))
    if gives_up == "goes":
        reserving.cancel()
    await asyncio.sleep(0)
    assert run.used > 0 and slots_used(run) == 9
    may_go_on.set()
    await leaving
    await asyncio.gather(reserving, return_exceptions=True)
    assert (run.used, slots_used(run)) == (0, 0)


async def test_copies_that_fail_are_the_workers_fault(bench: Any) -> None:
    run = await bench(**ROOM)
    run.may_fault = True
    await read(run, "first", DOCUMENT)
    await push_out(run)

    async def fails(_pages: Sequence[int], _slots: Sequence[int], _back: bool) -> None:
        raise RuntimeError("no such memory")

    run.engine._manager.host._move = fails
    with pytest.raises(DecodeFailed, match="did not come back from host memory: no such memory"):
        await go_on(run, "again", DOCUMENT, 144)
    assert (run.used, slots_used(run)) == (0, 0)
