"""Tests groups of pages on disk: concurrent requests load each group once. Compares loads with a plain
model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltafront.workers.kv.pages import store_tier
from deltafront.workers.kv.pages.host_tier import HostTier
from deltafront.workers.kv.pages.store_tier import StoreError, StoreTier

from ...suspensions import Acting, at_each_await
from ..keys import key_of
from .test_prefix_cache import manager, spell

GROUP = 2
"""Pages of a group in these tests."""
Loaded = tuple[list[int], int]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tier, "GROUP_PAGES", GROUP)


def groups_of(letters: str) -> Iterator[str]:
    """Return each whole group of a prompt, as the letters up to its end."""
    return (letters[:end] for end in range(GROUP, len(letters) + 1, GROUP))


def name_of(letters: str) -> bytes:
    key = key_of(spell(letters))
    return key.root + key.chain[-16:]


class Setup:
    """A disk with the groups of some prompts, and host memory with `slots` slots. A slot has the letters of
    the prompt up to it."""

    def __init__(self, slots: int, prompts: Sequence[str]) -> None:
        pages, clock = manager(4)
        self.host = HostTier(pages.pool.prefix_cache, 1, slots, self.no_move, clock)
        self.on_host = [""] * slots
        self.files = {name_of(group): group for letters in prompts for group in groups_of(letters)}
        self.letters = dict(self.files)
        """Letters of each group that has ever been saved."""
        self.damaged: set[bytes] = set()
        self.reading: dict[bytes, asyncio.Future[None]] = {}
        self.reads = 0
        saved = [(name, 0.0) for name in self.files]
        self.store = StoreTier(self.host, self.stored, self.undated, saved, 1000, clock)

    def undated(self, groups: Sequence[tuple[bytes, float]]) -> None:
        pass

    async def no_move(self, *_arguments: Any) -> None:
        raise AssertionError("nothing is in pages")

    async def stored(self, work: str, name: bytes, slots: Sequence[int], _state: int) -> None:
        if work == "remove":
            self.files.pop(name, None)
            return
        assert (work, name in self.reading) == ("load", False), "it is being read"
        assert len(self.store._slots_of(name)) < GROUP, "it has been read"
        self.reads += 1
        self.reading[name] = asyncio.get_running_loop().create_future()
        try:
            await self.reading[name]
        finally:
            del self.reading[name]
        if name in self.damaged or name not in self.files:
            raise StoreError("it is damaged")
        letters = self.files[name]
        for place, slot in enumerate(slots, start=len(letters) - GROUP):
            self.on_host[slot] = letters[: place + 1]

    async def saves(self, work: str, name: bytes, slots: Sequence[int], _state: int) -> None:
        """Save or remove a group, in place of `stored`."""
        await asyncio.sleep(0)
        if work == "save":
            self.files[name] = self.on_host[slots[-1]]
        else:
            self.files.pop(name)

    async def finish(self, name: bytes) -> None:
        self.reading[name].set_result(None)
        await settled()

    def load(self, letters: str) -> asyncio.Task[Loaded]:
        return asyncio.create_task(self.store.load(key_of(spell(letters)), 0, len(letters)))

    def check_found(self, letters: str) -> int:
        """Return the number of a prompt's pages in host memory, after a check of their content."""
        slots, _exact = self.host.find(key_of(spell(letters)), 0)
        assert [self.on_host[slot] for slot in slots] == [letters[: n + 1] for n in range(len(slots))]
        return len(slots)

    @property
    def all_free(self) -> bool:
        return self.host.pool.free == self.host.pool.total


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_requests_for_the_same_kv_file_load_the_file_only_once() -> None:
    run = Setup(20, ["abcd"])
    loads = [run.load(letters) for letters in ("abcd", "abxy", "abcdef")]
    await settled()
    assert run.reads == 2
    for name in list(run.reading):
        await run.finish(name)
    outcomes = [await load for load in loads]
    assert [brought for _held, brought in outcomes] == [4, 2, 4]
    assert run.check_found("abcd") == 4 and run.host.pool.used == 4
    for held, _brought in outcomes:
        run.host.pool.release(held)
    assert run.all_free and run.reads == 2
    again = await run.load("abcd")
    assert again[1] == 0 and len(again[0]) == 4, "it is in host memory now"
    run.host.pool.release(again[0])


async def test_damaged_kv_file_is_a_miss_for_all_waiting_requests() -> None:
    run = Setup(20, ["abcd"])
    run.damaged.add(name_of("ab"))
    loads = [run.load("abcd") for _ in range(3)]
    await settled()
    for name in list(run.reading):
        await run.finish(name)
    outcomes = [await load for load in loads]
    assert [brought for _held, brought in outcomes] == [0] * 3
    assert (run.store.lost, run.reads, run.check_found("abcd")) == (1, 2, 0)
    for held, _brought in outcomes:
        run.host.pool.release(held)
    assert run.all_free


async def test_lost_rank_fails_all_waiting_requests() -> None:
    run = Setup(20, ["ab"])
    loads = [run.load("ab") for _ in range(2)]
    await settled()
    run.reading[name_of("ab")].set_exception(RuntimeError("it is lost"))
    failures = await asyncio.gather(*loads, return_exceptions=True)
    assert [str(failure) for failure in failures] == ["it is lost"] * 2
    assert run.all_free and not run.store._loading


async def test_pages_keep_their_host_slots_until_they_are_saved() -> None:
    async def wanted_at(number: int) -> bool:
        run, key = Setup(2 * GROUP, ["xy"]), key_of(spell("ab"))
        run.store._room, run.store._stored = 1, run.saves
        pool = run.host.pool
        slots = pool.allocate(GROUP)
        pool.prefix_cache.add(key.root, key.chain, slots, 0.0)
        run.on_host[slots[0]], run.on_host[slots[1]] = "a", "ab"
        run.store._offer(slots)
        pool.release(slots)
        taken: list[int] = []

        def want() -> None:
            """Take all free slots for another prompt."""
            taken.extend(pool.allocate(pool.free))
            for slot in taken:
                run.on_host[slot] = "other"

        acting = Acting(run.store.run(), number, want)
        saving = acting.start()
        async with asyncio.timeout(
            60
        ):  # a thread writes the dates, so a fixed number of loop turns is not enough
            while not (saving.done() or not run.store.busy):
                await asyncio.sleep(0.001)
        assert not saving.done(), f"saving ended: {saving.exception()!r}"
        pool.release(taken)
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)
        assert all(name_of(letters) == name for name, letters in run.files.items())
        assert run.all_free
        return acting.acted

    assert await at_each_await(wanted_at) > 2, "a group is removed, one is saved, and dates are written"


async def test_loads_no_file_unless_host_memory_holds_the_whole_prefix() -> None:
    run = Setup(3, ["ab"])
    held = run.host.pool.allocate(2)
    assert [await load for load in (run.load("ab"), run.load("ab"))] == [([], 0)] * 2
    run.host.pool.release(held)
    assert run.all_free and run.reads == 0


class Model:
    """A model of a disk and its loads, with enough host memory for all. Groups and pages are named by the
    letters up to their ends."""

    def __init__(self, on_disk: Sequence[str]) -> None:
        self.on_disk, self.in_memory, self.reading = set(on_disk), set[str](), set[str]()
        """Names of groups on disk, of pages in memory, and of groups being loaded."""
        self.reads = 0
        self.loads: list[tuple[asyncio.Task[Loaded], int, dict[str, bool | None]]] = []
        """Each load: pages already in memory, and whether each group was loaded; None: not yet known."""

    def load(self, task: asyncio.Task[Loaded], letters: str) -> None:
        held = next((n for n in range(len(letters)) if letters[: n + 1] not in self.in_memory), len(letters))
        groups = dict[str, bool | None]()
        for group in list(groups_of(letters))[held // GROUP :]:
            if group not in self.on_disk:
                break
            groups[group] = True if self.pages(group) <= self.in_memory else None
            if groups[group] is None and group not in self.reading:
                self.reading.add(group)
                self.reads += 1
        self.loads.append((task, held, groups))

    def pages(self, group: str) -> set[str]:
        return {group[:-n] if n else group for n in range(GROUP)}

    def read(self, group: str, well: bool) -> None:
        self.reading.remove(group)
        if well:
            self.in_memory |= self.pages(group)
        else:
            self.on_disk.discard(group)
        for _task, _held, groups in self.loads:
            if group in groups and groups[group] is None:
                groups[group] = well

    def check(self) -> list[asyncio.Task[Loaded]]:
        """Check finished loads, and return them."""
        for task, held, groups in self.loads:
            assert task.done() == (None not in groups.values())
            if task.done():
                came = [*groups.values(), False].index(False)
                assert task.result()[1] == max(0, GROUP * came - held % GROUP)
        ended = [task for task, _held, _groups in self.loads if task.done()]
        self.loads = [load for load in self.loads if not load[0].done()]
        return ended


prompts = st.text(alphabet="ab", min_size=1, max_size=7)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(prompts, max_size=6), st.data())
def test_concurrent_loads_agree_with_a_plain_model_of_the_tier(
    written: list[str], data: st.DataObject
) -> None:
    async def run() -> None:
        setup = Setup(300, written)
        model, held = Model(list(setup.files.values())), list[asyncio.Task[Loaded]]()
        for _ in range(data.draw(st.integers(0, 25))):
            act = data.draw(st.sampled_from(["load", "load", "read", "read", "damage", "write", "end"]))
            if act == "load":
                letters = data.draw(prompts)
                model.load(setup.load(letters), letters)
            elif act == "read" and setup.reading:
                name = data.draw(st.sampled_from(sorted(setup.reading)))
                model.read(setup.letters[name], name not in setup.damaged)
                await setup.finish(name)
            elif act == "damage" and setup.files:
                setup.damaged.add(data.draw(st.sampled_from(sorted(setup.files))))
            elif act == "write":
                for group in groups_of(data.draw(prompts)):
                    name = name_of(group)
                    if name not in setup.reading:
                        setup.files[name] = setup.letters[name] = group
                        setup.damaged.discard(name)
                        setup.store._hold(name, 0.0)
                        setup.store._use([name])
                        model.on_disk.add(group)
            elif act == "end" and held:
                setup.host.pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))).result()[0])
            await settled()
            held += model.check()
            assert {setup.letters[name] for name in setup.reading} == model.reading
            assert setup.reads == model.reads
        for name in list(setup.reading):
            model.read(setup.letters[name], name not in setup.damaged)
            await setup.finish(name)
        held += model.check()
        assert not model.loads and not setup.store._loading
        for letters in written:
            setup.check_found(letters)
        for task in held:
            setup.host.pool.release(task.result()[0])
        assert setup.all_free

    asyncio.run(run())


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(prompts, min_size=1, max_size=6), st.integers(1, 12), st.data())
def test_scarce_host_memory_never_yields_wrong_kv(
    written: list[str], slots: int, data: st.DataObject
) -> None:
    async def run() -> None:
        setup, loads = Setup(slots, written), list[asyncio.Task[Loaded]]()
        for _ in range(data.draw(st.integers(0, 20))):
            act = data.draw(st.sampled_from(["load", "load", "read", "read", "end"]))
            if act == "load":
                loads.append(setup.load(data.draw(prompts)))
            elif act == "read" and setup.reading:
                await setup.finish(data.draw(st.sampled_from(sorted(setup.reading))))
            elif act == "end" and any(load.done() for load in loads):
                load = next(load for load in loads if load.done())
                loads.remove(load)
                setup.host.pool.release(load.result()[0])
            await settled()
            for letters in written:
                setup.check_found(letters)
        while setup.reading:
            await setup.finish(next(iter(setup.reading)))
        for load in loads:
            setup.host.pool.release(load.result()[0])
        assert setup.all_free and not setup.store._loading

    asyncio.run(run())
