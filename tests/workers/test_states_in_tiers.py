"""Prompts continue from states that come back from host memory or from disk, with answers equal to
transformers'."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from deltafront.workers.messages.events import FinishReason, Prefix
from deltafront.workers.messages.prompts import LINK_BYTES
from deltafront.workers.messages.requests import RefusalReason, Refused, Reservation

from .decode.test_disk_tier import GROUP, files, saved
from .decode.test_host_cache import copied
from .keys import key_of
from .test_states import SPACING, Expected, StateBench, branch, expected, model, prompt, served

__all__ = ["expected", "model", "served"]
ROOM: dict[str, Any] = {"cache_tokens": 48 * 16, "state_slots": 12, "host_cache_gib": 0.1}


async def push_out(run: StateBench, pages: int) -> None:
    """Evict all cached states and the cached pages beyond the first `pages`."""
    await copied(run)
    slots, pool = run.engine._manager.states, run.engine._manager.pool
    slots.release(slots.take(slots.total))
    pool.release(pool.allocate(pool.total - pages))


def places(run: StateBench, ids: list[int]) -> tuple[int, int]:
    """Return how many pages of a prompt's prefix are on the GPU, and how many only in host memory."""
    pages, slots, _exact = run.engine._manager.find(key_of(ids))
    return len(pages), len(slots)


@pytest.mark.parametrize("stages", [0, 1, 3])
@pytest.mark.parametrize("left", [0, 5, 48])
async def test_prompts_continue_from_host_memory(
    served: Any, expected: Expected, stages: int, left: int
) -> None:
    """stages = 0: a decode worker prefills the rest. left: pages that stay on the GPU."""
    run, document = await served(max(1, stages), **ROOM), prompt(300)
    await run.read("first", document + prompt(30, seed=1))
    await push_out(run, left)
    other = document + prompt(60, seed=2)
    held = await run.found(other)
    assert held == 256
    near, below = places(run, other)
    assert (near + below, below > 0) == (held // 16, left < 48)
    go_on = run.group_goes_on if stages else run.go_on
    assert (await go_on("other", other, held)).ids == expected(other)
    near, below = places(run, other)
    assert near >= held // 16 and not below, "all is on the GPU again"
    third = document + prompt(20, seed=3)
    assert (await run.go_on("third", third, held)).ids == expected(third)


async def test_statistics_tell_states_evicted_from_host_memory(served: Any) -> None:
    run = await served(**ROOM | {"host_cache_gib": 0.04})
    below = run.engine._manager.host.states.slots
    below.take(below.total - 2)
    for seed in range(3):
        await run.read(f"r{seed}", prompt(200, seed))
        await copied(run)
    (tier,) = (await run.engine.stats()).tiers
    assert tier.states_evicted == below.evicted > 0


async def test_requests_wait_for_one_copy_of_a_state(served: Any, expected: Expected) -> None:
    run, document = await served(**ROOM | {"state_slots": 20}), prompt(200)
    await run.read("first", document + prompt(30, seed=1))
    await push_out(run, 48)
    moved: list[int] = []
    host = run.engine._manager.host.states
    bring_back = host.bring_back

    async def counted(back: Any) -> None:
        moved.append(back.source)
        await asyncio.sleep(0.05)
        await bring_back(back)

    host.bring_back = counted
    asked = [document + prompt(10 + n, seed=2 + n) for n in range(3)]
    held = 3 * SPACING
    answers = await asyncio.gather(*(run.go_on(f"q{n}", ids, held) for n, ids in enumerate(asked)))
    assert [answer.ids for answer in answers] == [expected(ids) for ids in asked]
    assert len(moved) == 1


async def test_a_copy_that_fails_ends_its_requests_alone(served: Any, expected: Expected) -> None:
    run, document = await served(**ROOM), prompt(200)
    await run.read("first", document + prompt(30, seed=1))
    await push_out(run, 0)
    host = run.engine._manager.host.states

    async def fails(_back: Any) -> None:
        raise RuntimeError("no such memory")

    host.bring_back, whole = fails, host.bring_back
    other = document + prompt(25, seed=2)
    failed = (await run.go_on("fails", other, 3 * SPACING)).finish
    assert failed is not None and failed.reason is FinishReason.FAILED
    assert failed.message == "KV did not come back from host memory: no such memory"
    host.bring_back = whole
    assert await run.found(other) < 3 * SPACING, "the state is cached nowhere any more"
    assert (await run.talk("again", other)).ids == expected(other)


async def test_a_request_that_leaves_during_the_copy_spoils_nothing(served: Any, expected: Expected) -> None:
    run, document = await served(**ROOM), prompt(200)
    await run.read("first", document + prompt(30, seed=1))
    await push_out(run, 0)
    other, host = document + prompt(25, seed=2), run.engine._manager.host.states
    begun, may_end, bring_back = asyncio.Event(), asyncio.Event(), host.bring_back

    async def slowly(back: Any) -> None:
        begun.set()
        await may_end.wait()
        await bring_back(back)

    host.bring_back = slowly
    leaving = asyncio.create_task(run.go_on("leaves", other, 3 * SPACING))
    await begun.wait()
    cancelled = asyncio.create_task(run.engine.cancel("leaves"))
    await asyncio.sleep(0)
    assert not cancelled.done(), "the copy still writes into its pages and slot"
    may_end.set()
    await asyncio.gather(leaving, cancelled)
    assert (await run.talk("again", other)).ids == expected(other)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_came_back_answers_equal_those_read_anew(
    served: Any, expected: Expected, seed: int
) -> None:
    """Few pages and slots, so that both are evicted; prompts that branch at any token, several at once."""
    draw = random.Random(seed)
    room = {"state_slots": 9, "cache_tokens": 70 * 16, "host_cache_gib": 0.1}
    run = await served(1 + seed % 3, looks_ahead=bool(seed % 2), **room)
    said, came = [prompt(draw.randrange(100, 260), seed=seed)], 0
    for turn in range(6):
        asked = [branch(draw, said, turn) for _ in range(2)]
        came += sum(places(run, ids)[1] for ids in asked)
        answers = await asyncio.gather(
            *(run.talk(f"{turn}-{n}", ids, draw.random() < 0.5, wait=True) for n, ids in enumerate(asked))
        )
        for ids, answer in zip(asked, answers, strict=True):
            assert answer.ids == expected(ids)
            said.append([*ids, *answer.ids])
        await push_out(run, draw.randrange(12))
    assert came, "host memory should be used"


@pytest.mark.parametrize("by_group", [False, True])
async def test_a_later_worker_continues_from_a_state_on_disk(
    served: Any, expected: Expected, tmp_path: Path, by_group: bool
) -> None:
    kept = ROOM | {"store": str(tmp_path)}
    first, document = await served(**kept), prompt(2 * GROUP + 70)
    await first.read("first", document)
    await saved(first)
    groups = first.engine._tiers.store
    assert (len(groups), len(groups._with_state), len(files(tmp_path))) == (2, 2, 4 * first.ranks)
    second = await served(**kept)
    other = document[: 2 * GROUP + 20] + prompt(40, seed=2)
    prefix = await second.engine.find_prefix(key_of(other))
    assert prefix == Prefix(tokens=2 * GROUP, disk_tokens=2 * GROUP, has_state=True, group_tokens=2 * GROUP)
    go_on = second.group_goes_on if by_group else second.go_on
    assert (await go_on("other", other, 2 * GROUP)).ids == expected(other)
    short = document[: GROUP + 100] + prompt(9, seed=3)
    assert await second.found(short) == GROUP, "the state at its end is only on disk"
    assert (await second.go_on("short", short, GROUP)).ids == expected(short)
    assert await second.found(document[:GROUP]) == 0, "its last token must be computed"


async def test_a_prefix_on_disk_ends_where_a_state_is(
    served: Any, expected: Expected, tmp_path: Path
) -> None:
    """The file of the last group's state is gone, then those of both."""
    kept, document = ROOM | {"store": str(tmp_path)}, prompt(2 * GROUP + 70)
    first = await served(**kept)
    await first.read("first", document)
    await saved(first)
    key = key_of(document)
    early, late = (key.root + key.chain[pages * LINK_BYTES :][:LINK_BYTES] for pages in (15, 31))
    assert first.engine._tiers.store._with_state == {early, late}
    for name, found in ((late, GROUP), (early, 0)):
        await first.engine._tiers._memory.stored("remove", name + b"state", (), 0)
        later = await served(**kept)
        assert await later.found(document) == found
        if found:
            assert (await later.go_on("again", document, found)).ids == expected(document)


async def test_a_changed_file_of_a_state_is_a_miss(served: Any, expected: Expected, tmp_path: Path) -> None:
    kept, document = ROOM | {"store": str(tmp_path)}, prompt(GROUP + 70)
    first = await served(**kept)
    await first.read("first", document)
    await saved(first)
    second = await served(**kept)
    assert await second.found(document) == GROUP
    for file in files(tmp_path):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    reserved = await second.engine.reserve(
        Reservation(
            request_id="again", owner="me", new_tokens=70, max_tokens=1, prefix_tokens=GROUP, reads_rest=True,
            key=key_of(document),
        )
    )  # fmt: skip
    assert isinstance(reserved, Refused) and reserved.reason is RefusalReason.NO_PREFIX
    assert await second.found(document) == 0
    assert (await second.read("anew", document)).ids == expected(document)


async def test_disk_has_room_for_groups_and_their_states(served: Any, tmp_path: Path) -> None:
    kept = ROOM | {"store": str(tmp_path)}
    run = await served(**kept)
    store = run.engine._tiers.store
    store._room = 2 * (1 + store._state_groups)
    for seed in range(4):
        await run.read(f"r{seed}", prompt(GROUP + 70, seed))
        await saved(run)
        assert store._used <= store._room
    assert len(store) == len(store._with_state) == 2 and len(files(tmp_path)) == 4 * run.ranks


async def test_a_state_that_never_fits_on_disk_evicts_no_group(served: Any, tmp_path: Path) -> None:
    run = await served(**ROOM | {"store": str(tmp_path)})
    store = run.engine._tiers.store
    store._room, store._state_groups = 2, 2
    for seed in range(2):
        await run.read(f"r{seed}", prompt(GROUP + 70, seed))
        await saved(run)
    assert len(store) == 2 and not store._with_state
