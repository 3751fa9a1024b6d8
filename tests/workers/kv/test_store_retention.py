"""Compares the prefix cache's tier on disk with a plain list: saved and evicted groups, and those that a
later worker finds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafront.workers.kv.kv_files import KVFiles
from deltafront.workers.kv.pages.host_tier import HostTier
from deltafront.workers.kv.pages.pool import PAGE_TOKENS
from deltafront.workers.kv.pages.prefix_cache import PrefixCache
from deltafront.workers.kv.pages.store_tier import GROUP_PAGES, StoreTier
from deltafront.workers.messages.prompts import PromptKey

from ..keys import key_of
from ..prompts import Clock
from .loops import settle

SLOTS = 14 * GROUP_PAGES
"""Slots for all groups of prompts of up to three of two letters, so that host memory evicts none of them."""


def key(letters: str) -> PromptKey:
    """Return the prefix-cache key of a prompt with a group for each letter."""
    return key_of([ord(letter) for letter in letters for _ in range(GROUP_PAGES * PAGE_TOKENS)])


def name_of(letters: str) -> bytes:
    return key(letters).root + key(letters).chain[-16:]


def beginnings(letters: str) -> list[str]:
    return [letters[:end] for end in range(1, len(letters) + 1)]


class Disk:
    """Files on disk, and successive tiers that use them."""

    def __init__(self, room: int) -> None:
        self.clock, self.room = Clock(), room
        self.files: dict[bytes, list[str]] = {}
        self.dates: dict[bytes, float] = {}
        self.start()

    def start(self) -> None:
        now = self.clock.now
        saved = sorted((self.dates[name], name) for name in self.files)
        self.host = HostTier(PrefixCache(self.clock), 1, SLOTS, self.move, self.clock)
        self.on_host = [""] * SLOTS
        self.store = StoreTier(
            self.host,
            self.stored,
            self.date,
            [(name, date - now) for date, name in saved],
            self.room,
            self.clock,
        )

    async def move(self, pages: Sequence[int], slots: Sequence[int], back: bool) -> None:
        raise AssertionError("nothing comes from pages here")

    async def stored(self, work: str, name: bytes, slots: Sequence[int], _state: int) -> None:
        await asyncio.sleep(0)
        if work == "save":
            self.files[name] = [self.on_host[slot] for slot in slots]
        elif work == "load":
            for slot, letters in zip(slots, self.files[name], strict=True):
                self.on_host[slot] = letters
        else:
            del self.files[name]
        assert len(self.files) <= self.room

    def date(self, groups: Sequence[tuple[bytes, float]]) -> None:
        self.dates |= {name: self.clock.now + seconds for name, seconds in groups}

    async def keep(self, letters: str, retain_s: float) -> None:
        """Put a prompt's pages into host memory, as `HostTier` does."""
        pool, chain = self.host.pool, key(letters).chain
        known = list(self.host.find(key(letters), 0)[0])
        pool.incref(known)
        slots = [*known, *pool.allocate(len(letters) * GROUP_PAGES - len(known))]
        for place, slot in enumerate(slots):
            self.on_host[slot] = f"{letters[: place // GROUP_PAGES + 1]}{place}"
        pool.prefix_cache.add(key(letters).root, chain, slots, retain_s)
        pool.prefix_cache.retain(slots, retain_s)
        self.host.on_kept(slots)
        pool.release(slots)
        await self.settle()

    async def load(self, letters: str) -> None:
        slots, _brought = await self.store.load(key(letters), 0, len(letters) * GROUP_PAGES)
        held = [self.on_host[slot] for slot in slots]
        assert held == [f"{letters[: n // GROUP_PAGES + 1]}{n}" for n in range(len(slots))]
        self.host.pool.release(slots)
        await self.settle()
        assert self.host.pool.used == 0

    async def settle(self) -> None:
        await settle(self.store)

    def found(self, letters: str) -> int:
        return len(self.store.find(key(letters), 0)[0])


async def test_files_with_retain_s_are_evicted_last_until_it_expires() -> None:
    disk = Disk(room=2)
    await disk.keep("a", 10.0)
    for letters in ("b", "c"):
        disk.clock.now += 1
        await disk.keep(letters, 0.0)
    assert [disk.found(letters) for letters in "abc"] == [1, 0, 1]
    disk.clock.now += 9
    await disk.keep("d", 0.0)
    assert [disk.found(letters) for letters in "acd"] == [0, 1, 1]


async def test_retention_survives_a_worker_restart() -> None:
    disk = Disk(room=2)
    await disk.keep("a", 10.0)
    await disk.keep("b", 0.0)
    disk.clock.now += 5
    disk.start()
    disk.clock.now += 1
    await disk.keep("c", 0.0)
    assert [disk.found(letters) for letters in "abc"] == [1, 0, 1]
    disk.clock.now += 6
    await disk.keep("d", 0.0)
    assert [disk.found(letters) for letters in "acd"] == [0, 1, 1]


async def test_retention_continues_in_host_memory_after_a_load_from_disk() -> None:
    disk = Disk(room=2)
    await disk.keep("a", 10.0)
    until = disk.clock.now + 10
    disk.clock.now += 4
    disk.start()
    await disk.load("a")
    slots, _exact = disk.host.find(key("a"), 0)
    entries = [disk.host.pool.prefix_cache.get(slot) for slot in slots]
    assert [entry and entry.until for entry in entries] == [until] * GROUP_PAGES


async def test_evicts_a_prompts_last_blocks_first_from_disk() -> None:
    """This holds for a prompt longer than the tier's capacity, and after a restart."""
    disk = Disk(room=3)
    await disk.keep("abcd", 0.0)
    assert disk.found("abcd") == 3
    for restart in (False, True):
        disk.clock.now += 1
        if restart:
            disk.start()
        await disk.keep("xy"[restart], 0.0)
        assert disk.found("abcd") == 2 - restart


async def test_evicts_last_blocks_first_from_disk_after_their_retention() -> None:
    disk = Disk(room=3)
    await disk.keep("ba", 3.5)
    disk.clock.now += 3
    await disk.keep("a", 0.0)
    disk.clock.now += 1
    await disk.keep("aa", 0.0)
    assert [disk.found(letters) for letters in ("ba", "aa")] == [1, 2]


@dataclass
class Group:
    """A group in the list. `place`: its position in the order of eviction."""

    place: tuple[float, int]
    until: float
    date: float


class Brute:
    """A brute-force model of the tier."""

    def __init__(self, room: int) -> None:
        self.room, self.groups = room, dict[str, Group]()

    def keep(self, letters: str, retain_s: float, now: float) -> None:
        held: list[str] = []
        for name in beginnings(letters):
            if name not in self.groups:
                others = sorted(
                    (group.until > now, group.place, other)
                    for other, group in self.groups.items()
                    if other not in held
                )
                if len(self.groups) == self.room:
                    if not others:
                        continue
                    del self.groups[others[0][2]]
                self.groups[name] = Group((0, 0), now, 0)
            self.groups[name].until = max(self.groups[name].until, now + retain_s)
            held.append(name)
        self.use(held, now)

    def use(self, names: Sequence[str], now: float) -> None:
        for n, name in enumerate(names):
            group = self.groups[name]
            group.place, group.date = (now, -n), max(group.until, now) - n / 1000

    def restart(self, now: float) -> None:
        dates = sorted((group.date, name) for name, group in self.groups.items())
        for n, (date, name) in enumerate(dates):
            self.groups[name] = Group((now, n - len(dates)), date, date)

    def found(self, letters: str) -> list[str]:
        names = beginnings(letters)
        return next((names[:n] for n, name in enumerate(names) if name not in self.groups), names)


words = st.text("ab", min_size=1, max_size=3)
works = st.sampled_from(["keep", "keep", "load", "forget", "restart"])


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 6), st.lists(st.tuples(works, words, st.sampled_from([0.0, 0.0, 3.5, 8.5])), max_size=20)
)
def test_random_disk_tier_operations_agree_with_brute_force(
    room: int, steps: list[tuple[str, str, float]]
) -> None:
    async def run() -> None:
        disk, brute = Disk(room), Brute(room)
        for work, letters, retain_s in steps:
            disk.clock.now += 1
            now = disk.clock.now
            if work == "keep":
                await disk.keep(letters, retain_s)
                brute.keep(letters, retain_s, now)
            elif work == "load":
                near = len(disk.host.find(key(letters), 0)[0]) // GROUP_PAGES
                names = beginnings(letters)[near:]
                here = next((names[:n] for n, name in enumerate(names) if name not in brute.groups), names)
                await disk.load(letters)
                brute.use(here, now)
            elif work == "forget":
                disk.host.pool.clear_prefix_cache()
            else:
                disk.start()
                brute.restart(now)
            assert set(disk.files) == {name_of(name) for name in brute.groups}
            assert disk.found(letters) == len(brute.found(letters))

    asyncio.run(run())


def test_file_dates_record_each_retention_time(tmp_path: Path) -> None:
    files, sides = KVFiles(tmp_path, "a model"), [torch.zeros(2)]
    names = [bytes([n]) * 32 for n in range(3)]
    for name in names:
        files.save(name, sides)
    files.date([(names[0], 1000.0), (names[1], -5.0), (names[2], -6.0), (bytes(31), 1.0)])
    assert [name for name, _ in files.saved()] == [names[2], names[1], names[0]]
    assert 900 < files.saved()[-1][1] <= 1000 and all(seconds < 0 for _, seconds in files.saved()[:2])
