"""Remembered pages in host memory: what is copied, what is found, what is given up; against a list."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.host_memory import HostMemory, make_host_memory
from deltafront.workers.kv.pages.host_tier import HostTier
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.messages.requests import Refused
from deltafront.workers.settings import DecodeConfig

from ..keys import key_of
from .test_entries import manager, reserve, spell


class Setup:
    """A worker's pages and slots, each with the letters of the prompt up to it; empty: nobody knows."""

    def __init__(self, pages: int, slots: int) -> None:
        self.manager, clock = manager(pages)
        self.on_gpu, self.on_host = [""] * pages, [""] * slots
        self.host = HostTier(self.manager.pool.entries, slots, self.move, clock)
        self.manager.host = self.host
        self.let_go: list[str] = []
        offer = self.host._offer
        self.manager.pool.entries.on_idle = lambda pages: (self.note(pages), offer(pages))[1]
        self.moving = asyncio.Event()
        self.may_move = asyncio.Event()
        self.may_move.set()

    def note(self, pages: Sequence[int]) -> None:
        self.let_go += [self.on_gpu[page] for page in pages]

    async def move(self, pages: Sequence[int], slots: Sequence[int], back: bool) -> None:
        assert len(pages) == len(slots)
        self.moving.set()
        await self.may_move.wait()
        for page, slot in zip(pages, slots, strict=True):
            if back:
                self.on_gpu[page] = self.on_host[slot]
            else:
                self.on_host[slot] = self.on_gpu[page]

    async def settle(self) -> None:
        run = asyncio.create_task(self.host.run())
        while self.host.busy:
            await asyncio.sleep(0)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)

    def found(self, letters: str) -> tuple[int, int]:
        """How many pages and slots. All hold what they should."""
        pages, slots, _ = self.manager.find(key_of(spell(letters)))
        held = [self.on_gpu[page] for page in pages] + [self.on_host[slot] for slot in slots]
        assert held == [letters[: n + 1] for n in range(len(held))]
        return len(pages), len(slots)

    async def read(self, letters: str, after: int = 0) -> bool:
        """Read a prompt behind its first `after` pages. Returns False where there was no room."""
        pages = reserve(self.manager, letters, found=after)
        if isinstance(pages, Refused):
            return False
        await self.host.bring_back(pages.slots, pages.brought_back)
        pages.release_slots()
        assert [self.on_gpu[page] for page in pages.table[:after]] == [letters[: n + 1] for n in range(after)]
        self.write(pages, letters, after)
        pages.remember(len(spell(letters)))
        pages.end()
        return True

    def write(self, pages: RequestPages, letters: str, after: int) -> None:
        for n, page in enumerate(pages.table[after:], start=after):
            self.on_gpu[page] = letters[: n + 1]

    def all_free(self) -> bool:
        return all(pool.free == pool.total for pool in (self.manager.pool, self.host.pool))


async def test_what_the_gpu_gives_up_is_found_in_host_memory_and_comes_back() -> None:
    run = Setup(pages=6, slots=20)
    assert await run.read("abcd")
    await run.settle()
    run.manager.pool.release(run.manager.pool.allocate(4))
    assert run.found("abcd") == (2, 2) and run.host.too_late == 0
    assert await run.read("abcde", after=4)
    assert run.found("abcde") == (5, 0) and run.all_free()


async def test_what_was_given_up_before_it_was_copied_is_not_found() -> None:
    run = Setup(pages=6, slots=20)
    assert await run.read("abcd")
    assert await run.read("wxyz")
    await run.settle()
    assert run.found("abcd") == (1, 0) and run.host.too_late == 3


async def test_a_page_that_is_written_to_while_it_is_copied_is_not_found() -> None:
    run = Setup(pages=6, slots=20)
    assert await run.read("abcd")
    run.may_move.clear()
    settled = asyncio.create_task(run.settle())
    await run.moving.wait()
    assert await run.read("wxyz")
    run.may_move.set()
    await settled
    assert run.found("abcd") == (1, 0) and run.host.too_late == 3
    assert run.found("wxyz") == (4, 0) and run.all_free()


async def test_slots_that_a_request_waits_for_are_held_and_given_back_with_it() -> None:
    run = Setup(pages=8, slots=4)
    assert await run.read("abcd")
    await run.settle()
    run.manager.pool.release(run.manager.pool.allocate(8))
    waiting = reserve(run.manager, "abcd", found=3)
    assert isinstance(waiting, RequestPages) and len(waiting.slots) == 3
    assert await run.read("xy")
    await run.settle()
    assert run.host.pool.free == 1, "the one slot that nobody holds"
    run.manager.pool.release(run.manager.pool.allocate(3))
    assert run.found("xy") == (0, 1) and run.found("abc") == (0, 3)
    waiting.end()
    assert run.all_free()


words = st.text(alphabet="ab", min_size=1, max_size=6)


@settings(deadline=None)
@given(st.lists(st.tuples(words, st.booleans()), max_size=30), st.integers(7, 12), st.integers(1, 9))
def test_host_memory_holds_what_was_used_last_as_a_list_does(
    prompts: list[tuple[str, bool]], pages: int, slots: int
) -> None:
    """Prompts of two letters share beginnings. Where all is copied at once, host memory holds the `slots`
    beginnings that were let go of last."""

    async def run() -> None:
        setup, used = Setup(pages, slots), list[str]()
        for letters, hits in prompts:
            known = min(sum(setup.found(letters)), len(letters) - 1)
            setup.let_go = []
            assert await setup.read(letters, known if hits else 0)
            await setup.settle()
            assert setup.host.too_late == 0
            new = [name for name in setup.let_go if name not in used]
            seen = [name for name in setup.let_go if name in used]
            room = slots - len(seen)
            others = [name for name in used if name not in seen]
            used = (others + new)[max(0, len(others + new) - room) :] + seen
            in_host = {name for name in used if setup.host.pool.entries.page_of(name_of(name)) is not None}
            assert in_host == set(used) and len(setup.host.pool.entries) == len(used)
            assert setup.all_free()

    asyncio.run(run())


@settings(deadline=None)
@given(st.data())
def test_nothing_wrong_is_found_however_copies_and_reads_fall_together(data: st.DataObject) -> None:
    async def run() -> None:
        setup = Setup(data.draw(st.integers(7, 10)), data.draw(st.integers(1, 9)))
        tasks: list[asyncio.Task[Any]] = []
        for letters in data.draw(st.lists(words, max_size=20)):
            known = min(sum(setup.found(letters)), len(letters) - 1)
            tasks.append(asyncio.create_task(setup.read(letters, data.draw(st.integers(0, known)))))
            if data.draw(st.booleans()):
                tasks.append(asyncio.create_task(setup.settle()))
            for _ in range(data.draw(st.integers(0, 4))):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        await setup.settle()
        assert setup.all_free()

    asyncio.run(run())


def name_of(letters: str) -> bytes:
    key = key_of(spell(letters))
    return key.root + key.chain[-16:]


@pytest.mark.parametrize("int8", [False, True])
def test_copies_are_byte_for_byte_wherever_pages_and_slots_lie(int8: bool) -> None:
    cache = PagedKVCache(range(3), 2, 8, 12, torch.float32, "cpu", int8=int8)
    memory = HostMemory(cache, 9)
    for side in cache.sides:
        side.copy_(torch.randint(0, 200, side.shape))
    before = [side.clone() for side in cache.sides]
    pages, slots = [4, 5, 6, 1, 9, 0], [8, 2, 3, 4, 5, 0]
    memory.copy(pages, slots, back=False)
    for side in cache.sides:
        side.zero_()
    memory.copy([7, 8], [3, 8], back=True)
    for side, old in zip(cache.sides, before, strict=True):
        assert torch.equal(side[:, [7, 8]], old[:, [6, 4]])
        side[:, [7, 8]] = 0
        assert not side.any(), "nothing else was written"


def test_too_little_host_memory_is_refused_in_a_line() -> None:
    cache = PagedKVCache(range(3), 2, 8, 12, torch.float32, "cpu")
    assert make_host_memory(cache, DecodeConfig(), "") is None
    with pytest.raises(ValueError, match=r"host_cache_gib: 1e-06 is too little, 0\.\d+ is the least"):
        make_host_memory(cache, DecodeConfig(host_cache_gib=1e-6), "")
