"""Compares the prefix cache's tier in host memory with a plain list: copied, found and evicted pages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.host_memory import HostMemory, make_host_memory
from deltafront.workers.kv.pages import host_tier
from deltafront.workers.kv.pages.eviction import CachedBlock
from deltafront.workers.kv.pages.host_tier import HostTier, Runs
from deltafront.workers.kv.pages.pool import page_runs
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.kv.states import LinearStates
from deltafront.workers.messages.requests import DecodeFailed, Refused
from deltafront.workers.settings import DecodeConfig

from ..keys import key_of
from .loops import settle
from .test_prefix_cache import manager, reserve, spell

LAYERS = 3


class Setup:
    """A worker's pages and slots by layer. Each has the letters of the prompt up to it; empty: unknown."""

    def __init__(self, pages: int, slots: int) -> None:
        self.manager, self.clock = manager(pages)
        self.on_gpu = [[""] * pages for _ in range(LAYERS)]
        self.on_host = [[""] * slots for _ in range(LAYERS)]
        self.host = HostTier(self.manager.pool.prefix_cache, LAYERS, slots, self.move, self.clock)
        self.manager.host = self.host
        self.moved_back: list[tuple[str, int]] = []
        """Layers that were copied back, in order."""
        self.moves_fail = False
        self.let_go: list[str] = []
        offer = self.host._offer
        self.manager.pool.prefix_cache.on_evictable = lambda pages: (self.note(pages), offer(pages))[1]
        self.moving = asyncio.Event()
        self.may_move = asyncio.Event()
        self.may_move.set()

    async def __aenter__(self) -> Self:
        self.back = asyncio.create_task(self.host.run_back())
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.back.cancel()
        await asyncio.gather(self.back, return_exceptions=True)
        assert not self.host._coming

    def note(self, pages: Sequence[int]) -> None:
        self.let_go += [self.on_gpu[0][page] for page in pages]

    async def move(self, runs: Runs, layers: range, back: bool) -> None:
        self.moving.set()
        await self.may_move.wait()
        if self.moves_fail and back:
            raise RuntimeError("no such memory")
        for layer in layers:
            pages, slots = self.on_gpu[layer], self.on_host[layer]
            for page, slot, count in runs:
                if back:
                    pages[page : page + count] = slots[slot : slot + count]
                    self.moved_back += [(letters, layer) for letters in slots[slot : slot + count]]
                else:
                    slots[slot : slot + count] = pages[page : page + count]

    async def settle(self) -> None:
        await settle(self.host)

    def found(self, letters: str) -> tuple[int, int]:
        """Return the numbers of pages and slots found, after a check of their content."""
        pages, slots, _ = self.manager.find(key_of(spell(letters)))
        coming = max((one.left for one in self.host.coming_to(pages)), default=0)
        for on_gpu, on_host in list(zip(self.on_gpu, self.on_host, strict=True))[: LAYERS - coming]:
            held = [on_gpu[page] for page in pages] + [on_host[slot] for slot in slots]
            assert held == [letters[: n + 1] for n in range(len(held))]
        return len(pages), len(slots)

    async def read(self, letters: str, after: int = 0, leaves: bool = False) -> bool:
        """Prefill a prompt after its first `after` pages, layer by layer. Returns False if there were too few
        pages. `leaves`: cancel the request after its first layer."""
        pages = reserve(self.manager, letters, found=after)
        if isinstance(pages, Refused):
            return False
        for page in pages.table[after:]:
            for layer in range(LAYERS):
                self.on_gpu[layer][page] = "written to"
        try:
            for layer in range(1 if leaves else LAYERS):
                await pages.come(LAYERS - 1 - layer)
                held = [self.on_gpu[layer][page] for page in pages.table[:after]]
                assert held == [letters[: n + 1] for n in range(after)]
                self.write(pages, letters, after, layer)
            if not leaves:
                pages.cache_prefix(len(spell(letters)))
        finally:
            pages.end()
            await pages.freed.wait()
        return True

    def write(self, pages: RequestPages, letters: str, after: int, layer: int) -> None:
        for n, page in enumerate(pages.table[after:], start=after):
            self.on_gpu[layer][page] = letters[: n + 1]

    def all_free(self) -> bool:
        return all(pool.free == pool.total for pool in (self.manager.pool, self.host.pool))


async def test_blocks_evicted_from_the_gpu_come_back_from_host_memory() -> None:
    async with Setup(pages=6, slots=20) as run:
        assert await run.read("abcd")
        await run.settle()
        run.manager.pool.release(run.manager.pool.allocate(4))
        assert run.found("abcd") == (2, 2) and run.host.too_late == 0
        assert await run.read("abcde", after=4)
        await asyncio.sleep(0)  # requests continue before their slots are released
        assert run.found("abcde") == (5, 0) and run.all_free()


@pytest.fixture
def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each copy move one layer, for any number of pages."""
    monkeypatch.setattr(host_tier, "BATCH_PAGES", 1)


async def pushed_out(run: Setup, letters: str) -> None:
    assert await run.read(letters)
    await run.settle()
    pool = run.manager.pool
    pool.release(pool.allocate(pool.total))
    assert run.found(letters) == (0, len(letters))


@pytest.mark.usefixtures("layer_by_layer")
async def test_two_requests_for_the_same_pages_wait_for_one_copy() -> None:
    """The second prompt is longer, and more of it is in host memory."""
    async with Setup(pages=20, slots=20) as run:
        await pushed_out(run, "abcdef")
        first = asyncio.create_task(run.read("abcx", after=3))
        await asyncio.sleep(0)
        assert run.found("abcdef") == (3, 3), "they are named before they are there"
        second = asyncio.create_task(run.read("abcdefy", after=6))
        assert await first and await second
        once = [(letters, layer) for layer in range(LAYERS) for letters in ("abc", "abcdef")]
        assert sorted(run.moved_back) == sorted(
            (letters[: n + 1], layer)
            for letters, layer in once
            for n in range(0 if letters == "abc" else 3, len(letters))
        )
        assert run.found("abcdefy") == (7, 0) and run.all_free()


@pytest.mark.usefixtures("layer_by_layer")
async def test_host_copy_continues_for_waiting_requests_if_its_starter_ends() -> None:
    async with Setup(pages=20, slots=20) as run:
        await pushed_out(run, "abc")
        run.may_move.clear()
        reads = [asyncio.create_task(run.read(f"abc{n}", after=3, leaves=n == 0)) for n in range(2)]
        await asyncio.sleep(0)
        run.may_move.set()
        assert await asyncio.gather(*reads) == [True, True]
        assert len(run.moved_back) == 3 * LAYERS and run.all_free()


@pytest.mark.usefixtures("layer_by_layer")
async def test_failed_copy_fails_all_waiting_requests_and_caches_nothing() -> None:
    async with Setup(pages=20, slots=20) as run:
        await pushed_out(run, "abc")
        run.moves_fail = True
        reads = [asyncio.create_task(run.read(f"abc{n}", after=3)) for n in range(2)]
        failures = await asyncio.gather(*reads, return_exceptions=True)
        assert [type(failure) for failure in failures] == [DecodeFailed] * 2
        assert run.found("abc") == (0, 3) and run.all_free()


@pytest.mark.usefixtures("layer_by_layer")
async def test_concurrent_copies_take_turns() -> None:
    """A short prompt does not wait for the whole copy of a long one."""
    async with Setup(pages=20, slots=20) as run:
        await pushed_out(run, "abcdef")
        await pushed_out(run, "z")
        long, short = (asyncio.create_task(run.read(f"{known}x", len(known))) for known in ("abcdef", "z"))
        assert await long and await short
        moves = [move for move in run.moved_back if move[0] in "az"]
        assert moves == [("a", 0), ("z", 0), ("z", 1), ("z", 2), ("a", 1), ("a", 2)]


async def test_blocks_evicted_before_their_copy_to_host_are_cache_misses() -> None:
    run = Setup(pages=6, slots=20)
    assert await run.read("abcd")
    assert await run.read("wxyz")
    await run.settle()
    assert run.found("abcd") == (1, 0) and run.host.too_late == 3


async def test_page_reused_during_its_copy_to_host_is_a_cache_miss() -> None:
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


async def test_waiting_request_holds_its_host_slots_until_it_ends() -> None:
    run = Setup(pages=8, slots=4)
    assert await run.read("abcd")
    await run.settle()
    run.manager.pool.release(run.manager.pool.allocate(8))
    waiting = reserve(run.manager, "abcd", found=3)
    assert isinstance(waiting, RequestPages) and waiting.host_tokens == 48
    assert await run.read("xy")
    await run.settle()
    assert run.host.pool.free == 1, "the one slot that nobody holds"
    run.manager.pool.release(run.manager.pool.allocate(3))
    assert run.found("xy") == (0, 1) and run.found("abc") == (3, 0)
    waiting.end()
    assert not waiting.freed.is_set(), "they are still to be written to"
    async with run:
        await waiting.freed.wait()
        await asyncio.sleep(0)
        assert run.found("abc") == (3, 0) and run.all_free()


@pytest.mark.parametrize("read_again", [False, True])
async def test_later_retention_applies_in_host_memory_too(read_again: bool) -> None:
    run = Setup(pages=8, slots=20)
    pool = run.manager.pool
    assert await run.read("ab")
    await run.settle()
    if read_again:  # so that each tier has its own block
        pool.release(pool.allocate(8))
        assert await run.read("ab")
    pages, _slots, _exact = run.manager.find(key_of(spell("ab")))
    pool.incref(pages)
    pool.prefix_cache.retain(pages, 10.0)
    pool.release(pages)
    await run.settle()
    until = pool.prefix_cache[pages[0]].until
    slots = [run.host.pool.prefix_cache.page_of(name_of(letters)) for letters in ("a", "ab")]
    assert [run.host.pool.prefix_cache[slot].until for slot in slots if slot is not None] == [until] * 2


words = st.text(alphabet="ab", min_size=1, max_size=6)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(words, st.booleans()), max_size=30), st.integers(7, 12), st.integers(1, 9))
def test_host_memory_evicts_the_least_recently_used_leaves(
    monkeypatch: pytest.MonkeyPatch, prompts: list[tuple[str, bool]], pages: int, slots: int
) -> None:
    """Prompts of two letters share beginnings. Where all is copied at once and no interval is known, host
    memory gives up what was let go of first and what no other block follows."""
    monkeypatch.setattr(CachedBlock, "returned", lambda _block, _now: None)

    async def run() -> None:
        async with Setup(pages, slots) as setup:
            await check(setup)

    async def check(setup: Setup) -> None:
        used: dict[str, int] = {}
        for number, (letters, hits) in enumerate(prompts):
            setup.clock.now += 1.0
            in_pages, in_slots = setup.found(letters)
            known = min(in_pages + in_slots, len(letters) - 1) if hits else 0
            setup.let_go = []
            assert await setup.read(letters, known)
            await setup.settle()
            assert setup.host.too_late == 0
            seen = {name for name in setup.let_go if name in used}
            new = [name for name in setup.let_go if name not in used]
            new = new[max(0, len(new) - (slots - len(seen))) :]
            used |= dict.fromkeys(seen, number)
            while len(used) + len(new) > slots:
                idle = [one for one in used if one not in seen]
                leaves = [one for one in idle if not {one + "a", one + "b"} & used.keys()]
                if not leaves:
                    return  # pages in use follow all others: which one is evicted is not specified
                del used[min(leaves, key=lambda one: used[one])]
            used |= dict.fromkeys(new, number)
            cache = setup.host.pool.prefix_cache
            assert len(cache) == len(used) and all(cache.page_of(name_of(one)) is not None for one in used)
            assert setup.all_free()

    asyncio.run(run())


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.usefixtures("layer_by_layer")
def test_random_copies_and_requests_never_yield_wrong_kv(data: st.DataObject) -> None:
    """Some requests end while their pages are copied back, and some copies fail."""

    async def run() -> None:
        async with Setup(data.draw(st.integers(7, 10)), data.draw(st.integers(1, 9))) as setup:
            await act(setup)
            await setup.settle()
            assert setup.all_free()

    async def act(setup: Setup) -> None:
        tasks: list[asyncio.Task[Any]] = []
        for letters in data.draw(st.lists(words, max_size=20)):
            setup.moves_fail = data.draw(st.integers(0, 9)) == 0
            known = min(sum(setup.found(letters)), len(letters) - 1)
            reading = setup.read(letters, data.draw(st.integers(0, known)), data.draw(st.booleans()))
            tasks.append(asyncio.create_task(reading))
            if data.draw(st.booleans()):
                tasks.append(asyncio.create_task(setup.settle()))
            for _ in range(data.draw(st.integers(0, 4))):
                await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, DecodeFailed):
                raise outcome

    asyncio.run(run())


def name_of(letters: str) -> bytes:
    key = key_of(spell(letters))
    return key.root + key.chain[-16:]


@pytest.mark.parametrize("int8", [False, True])
def test_copies_pages_to_host_slots_and_back_byte_for_byte(int8: bool) -> None:
    cache = PagedKVCache(range(3), 2, 8, 12, torch.float32, "cpu", int8=int8)
    memory = HostMemory(cache, 9)
    for side in cache.sides:
        side.copy_(torch.randint(0, 200, side.shape))
    before = [side.clone() for side in cache.sides]
    runs = page_runs([4, 5, 6, 1, 9, 0], [8, 2, 3, 4, 5, 0])
    assert runs == [(4, 8, 1), (5, 2, 2), (1, 4, 1), (9, 5, 1), (0, 0, 1)]
    memory.copy(runs, range(3), back=False)
    for side in cache.sides:
        side.zero_()
    memory.copy(page_runs([7, 8], [3, 8]), range(1, 3), back=True)
    for side, old in zip(cache.sides, before, strict=True):
        assert torch.equal(side[1:, [7, 8]], old[1:, [6, 4]])
        side[1:, [7, 8]] = 0
        assert not side.any(), "nothing else was written"


def test_refuses_too_little_host_memory_in_one_line() -> None:
    cache = PagedKVCache(range(3), 2, 8, 12, torch.float32, "cpu")
    assert make_host_memory(cache, DecodeConfig(), "") is None
    with pytest.raises(ValueError, match=r"host_cache_gib: 1e-06 is too little, 0\.\d+ is the least"):
        make_host_memory(cache, DecodeConfig(host_cache_gib=1e-6), "")


@pytest.mark.parametrize("ranks", [1, 2])
def test_pages_and_states_of_all_ranks_share_the_memory(ranks: int) -> None:
    """They have the proportion that they have on the GPU, in a cache of 4096 tokens."""
    cache = PagedKVCache((0, 3), 4 // ranks, 16, 5, torch.float32, "cpu", ranks=ranks)
    sizes = (3, 96 // ranks), (4 // ranks, 8, 16)
    cache.states = LinearStates((1, 2), *sizes, 2, torch.float32, torch.device("cpu"))
    config = DecodeConfig(host_cache_gib=0.02, cache_tokens=4096, state_slots=40)
    memory = make_host_memory(cache, config, "")
    assert memory is not None
    page = sum(side[:, 0].nbytes for side in memory.sides) * ranks
    state = sum(one[0].nbytes for one in memory._states) * ranks
    taken = memory.slots * page, memory.state_slots * state
    assert 0.98 * 0.02 * 2**30 < sum(taken) <= 0.02 * 2**30
    assert taken[1] / taken[0] == pytest.approx(40 * state / (256 * page), rel=0.02)


def test_host_memory_holds_a_batch_of_pages_and_a_state_at_least() -> None:
    """With few slots on the GPU, the state alone decides: its share is small."""
    cache = PagedKVCache((0, 3), 2, 8, 5, torch.float32, "cpu")
    cache.states = LinearStates((1, 2), (3, 96), (4, 64, 64), 2, torch.float32, torch.device("cpu"))
    config = DecodeConfig(host_cache_gib=0.002, cache_tokens=65_536, state_slots=4)
    with pytest.raises(ValueError, match=r"host_cache_gib: 0\.002 is too little, 0\.004 is the least"):
        make_host_memory(cache, config, "")
    memory = make_host_memory(cache, replace(config, host_cache_gib=0.005), "")
    assert memory is not None and memory.state_slots == 1 and memory.slots > host_tier.BATCH_PAGES
