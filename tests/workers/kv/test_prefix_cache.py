"""Compares the prefix cache with a brute-force cache: found blocks, order of eviction, and retention."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafront.kernels.methods import method_spec
from deltafront.workers.kv.pages import eviction
from deltafront.workers.kv.pages.leases import Leases
from deltafront.workers.kv.pages.page_manager import PageManager
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, OutOfPages, PagePool
from deltafront.workers.kv.pages.prefix_cache import PrefixCache
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.messages.prompts import LINK_BYTES
from deltafront.workers.messages.requests import RefusalReason, Refused, Reservation

from ..keys import key_of
from ..prompts import Clock

STREAMING = method_spec("streaming", {"min_tokens": 0})


def manager(pages: int) -> tuple[PageManager, Clock]:
    clock = Clock()
    pool = PagePool(pages, prefix_cache=PrefixCache(clock))
    return PageManager(pool, Leases("w", pool, 1e9), 1 << 20), clock


def spell(letters: str) -> list[int]:
    """Return token ids with a page for each letter."""
    return [ord(letter) for letter in letters for _ in range(PAGE_TOKENS)]


def reserve(manager: PageManager, letters: str, found: int = 0, **more: Any) -> RequestPages | Refused:
    """Reserve pages for a prompt of whole pages, and for one answer token in another page."""
    key = key_of(
        spell(letters),
        **{name: more.pop(name) for name in ("remembers", "retain_s", "method") if name in more},
    )
    tokens = PAGE_TOKENS * found
    given = {"new_tokens": len(spell(letters)) - tokens, "max_tokens": 1, "prefix_tokens": tokens, **more}
    return manager.reserve(Reservation(request_id="r", owner="me", key=key, **given), now=0.0)


def read(manager: PageManager, letters: str, **more: Any) -> None:
    pages = reserve(manager, letters, **more)
    assert isinstance(pages, RequestPages)
    pages.cache_prefix(len(spell(letters)))
    pages.end()


def found(manager: PageManager, letters: str, **more: Any) -> int:
    return len(manager.pool.prefix_cache.find(key_of(spell(letters), **more))[0])


def test_prefix_cache_hits_only_prompts_with_the_same_tokens() -> None:
    pages, _ = manager(20)
    read(pages, "abcd")
    assert [found(pages, letters) for letters in ("abcd", "abxd", "b", "abcdef", "")] == [4, 2, 0, 4, 0]
    assert found(pages, "abcd", owner="you") == found(pages, "abcd", salt="s") == 0
    assert found(pages, "abcd", method=STREAMING) == 4, "dense K/V serves every method"
    assert pages.pool.free == pages.pool.total == 20


def test_hits_sparse_blocks_only_with_the_same_method() -> None:
    pages, _ = manager(40)
    read(pages, "a" * 16, method=STREAMING)
    assert found(pages, "a" * 16) == 0
    own = key_of(spell("a" * 16), method=STREAMING)
    found_pages, exact = pages.pool.prefix_cache.find(own)
    assert len(found_pages) == 16 and not exact
    read(pages, "a" * 16)
    assert pages.pool.prefix_cache.find(own) == (found_pages, False), "its own come first"
    assert pages.pool.prefix_cache.find(key_of(spell("a" * 16)))[1]


def test_evicts_the_least_recently_used_prompts_last_blocks_first() -> None:
    pages, clock = manager(8)
    for letters in ("abc", "xyz"):
        read(pages, letters)
        clock.now += 1
    touched = reserve(pages, "abcq", found=3)
    assert isinstance(touched, RequestPages) and touched.held_tokens == 48
    touched.end()
    clock.now += 1
    assert (found(pages, "abc"), found(pages, "xyz"), pages.pool.free) == (3, 3, 8)
    taken = pages.pool.allocate(4)
    assert (found(pages, "abc"), found(pages, "xyz")) == (3, 1)
    more = pages.pool.allocate(2)
    assert (found(pages, "abc"), found(pages, "xyz")) == (2, 0)
    assert (pages.pool.prefix_cache.evicted, pages.pool.prefix_cache.evicted_age_s) == (4, 3 * 2.0 + 1.0)
    pages.pool.release((*taken, *more))


def test_blocks_with_retain_s_are_evicted_last_until_it_expires() -> None:
    pages, clock = manager(6)
    read(pages, "ab", retain_s=10.0)
    clock.now += 1
    read(pages, "xy")
    held = pages.pool.allocate(4)
    assert (found(pages, "ab"), found(pages, "xy")) == (2, 0)
    assert isinstance(reserve(pages, "pq"), Refused), "a hint is no lease, but three pages are no two"
    pages.pool.release(held)
    clock.now += 1
    read(pages, "xy")
    clock.now += 9
    held = pages.pool.allocate(4)
    assert (found(pages, "ab"), found(pages, "xy")) == (0, 2), "the older, now that its time is over"
    pages.pool.release(held)
    cache = pages.pool.prefix_cache
    read(pages, "ab", retain_s=10.0)
    assert (cache.evicted, cache.evicted_retained) == (4, 0)
    pages.pool.release(pages.pool.allocate(6))
    assert (cache.evicted, cache.evicted_retained) == (8, 2), "nothing else was left"


def test_request_never_evicts_the_prefix_it_hits() -> None:
    pages, _ = manager(7)
    read(pages, "abcd")
    other = pages.pool.allocate(1)
    refused = reserve(pages, "abcdef", found=4)
    assert isinstance(refused, Refused) and (refused.reason, refused.needed) == (RefusalReason.PAGES, 3)
    assert (refused.free, found(pages, "abcd"), pages.pool.free) == (2, 4, 6)
    continued = reserve(pages, "abcde", found=4)
    assert isinstance(continued, RequestPages)
    continued.end()
    pages.pool.release(other)


def test_refuses_a_prefix_that_was_evicted() -> None:
    pages, _ = manager(6)
    read(pages, "abcd")
    pages.pool.release(pages.pool.allocate(4))
    refused = reserve(pages, "abcde", found=4)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NO_PREFIX


def test_failed_request_caches_nothing_and_evicts_nothing_cached() -> None:
    pages, _ = manager(12)
    read(pages, "ab")
    failed = reserve(pages, "abcd", found=2)
    assert isinstance(failed, RequestPages)
    failed.cache_prefix(64)
    sharing = reserve(pages, "abcdx", found=4)
    assert isinstance(sharing, RequestPages)
    failed.end(failed=True)
    assert found(pages, "abcd") == 2
    sharing.end()
    assert (pages.pool.free, found(pages, "abcd")) == (12, 2)


def test_opted_out_request_caches_nothing() -> None:
    pages, _ = manager(6)
    read(pages, "abcd", remembers=False)
    assert found(pages, "abcd") == len(pages.pool.prefix_cache) == 0


def test_session_pages_are_held_and_stay_cached_after_it_ends() -> None:
    pages, _ = manager(5)
    made = reserve(pages, "abc")
    assert isinstance(made, RequestPages)
    made.cache_prefix(48)
    lease = pages.keep_session(made, 40, "me", 10.0, now=0.0)
    made.end()
    assert (pages.pool.free, len(lease.pages)) == (2, 3)
    with pytest.raises(OutOfPages):
        pages.pool.allocate(3)
    assert pages.leases.expire(10.0) == 1
    assert (pages.pool.free, found(pages, "abc")) == (5, 3)
    pages.pool.clear_prefix_cache()
    assert (pages.pool.free, found(pages, "abc"), len(pages.pool.allocate(5))) == (5, 0, 5)


TOTAL = 14

# --- compared with brute force ----------------------------------------------------------------------------


@dataclass
class Kept:
    """A beginning that the brute force remembers, as a `CachedBlock`."""

    page: int
    until: float
    interval: float
    used: float = math.inf

    def returned(self, now: float) -> None:
        if self.used < now and not self.interval:
            self.interval = now - self.used
        elif self.used < now:
            late = now - self.used - self.interval
            self.interval += (eviction.RISE if late > 0 else eviction.FALL) * late


@dataclass
class Brute:
    """holders: the pages of each request. gone: what evicted first pages leave."""

    total: int
    remembered: dict[str, Kept] = field(default_factory=dict)
    holders: list[tuple[int, ...]] = field(default_factory=list)
    gone: dict[str, Kept] = field(default_factory=dict)

    def held(self, page: int) -> int:
        return sum(page in holder for holder in self.holders)

    def found(self, letters: str) -> list[int]:
        pages: list[int] = []
        for end in range(1, len(letters) + 1):
            if letters[:end] not in self.remembered:
                break
            pages.append(self.remembered[letters[:end]].page)
        return pages

    def idle(self) -> list[str]:
        return [name for name, one in self.remembered.items() if not self.held(one.page)]

    def hold(self, pages: Sequence[int], now: float) -> None:
        for one in self.remembered.values():
            if one.page in pages and not self.held(one.page):
                one.returned(now)

    def wait(self, name: str, now: float) -> float:
        """Return the seconds until it is expected."""
        one = self.remembered[name]
        due = one.used + one.interval if one.interval else -math.inf
        return due - now if due > now else now - one.used

    def first_to_go(self, now: float) -> str:
        idle = self.idle()
        idle = [name for name in idle if self.remembered[name].until <= now] or idle
        known = "".join(f" {name}" for name in self.remembered)
        leaves = [name for name in idle if not re.search(rf" {name}\w", known)]
        if leaves:
            return max(leaves, key=lambda name: self.wait(name, now))
        return min(idle, key=lambda name: (self.remembered[name].used, -len(name)))

    def free(self) -> int:
        return self.total - len({page for holder in self.holders for page in holder})

    def make_room(self, pages: int, now: float) -> None:
        for _ in range(max(0, pages - self.free() + len(self.idle()))):
            name = self.first_to_go(now)
            kept = self.remembered.pop(name)
            if len(name) == 1:
                self.gone[name] = kept

    def add(self, name: str, page: int, until: float, before: Kept | None, now: float) -> Kept:
        """before: the block that was added before it, or is before it in the prompt."""
        new = Kept(page, until, 0.0 if before is None else before.interval)
        if name in self.gone:
            past = self.gone.pop(name)
            new.used, new.interval = past.used, past.interval
        new.returned(now)
        self.remembered[name] = new
        return new


@dataclass
class Run:
    """A request in both caches. `offered`: number of its first pages already offered to the cache."""

    letters: str
    pages: RequestPages
    retain_s: float
    offered: int


class Both:
    """Runs the prefix cache and the brute-force cache in step."""

    def __init__(self) -> None:
        self.pages, self.clock = manager(TOTAL)
        self.brute = Brute(TOTAL)
        self.live: list[Run] = []

    def read(self, letters: str, retain_s: float) -> None:
        brute, held = self.brute, self.brute.found(letters)
        assert list(self.pages.pool.prefix_cache.find(key_of(spell(letters)))[0]) == held
        use = min(len(held), len(letters) - 1)
        needed = len(letters) + 1 - use
        room = brute.free() - sum(not brute.held(page) for page in held[:use])
        answer = reserve(self.pages, letters, found=use, retain_s=retain_s)
        assert isinstance(answer, RequestPages) == (needed <= room)
        if isinstance(answer, RequestPages):
            brute.hold(held[:use], self.clock.now)
            brute.holders.append(tuple(held[:use]))
            brute.make_room(needed, self.clock.now)
            brute.holders[-1] = answer.table
            assert answer.table[:use] == tuple(held[:use])
            self.live.append(Run(letters, answer, retain_s, use))

    def cache_prefix(self, run: Run) -> None:
        run.pages.cache_prefix(len(spell(run.letters)))
        remembered, now = self.brute.remembered, self.clock.now
        before = remembered.get(run.letters[: run.offered])
        carried: Kept | None = None
        for end in range(1, len(run.letters) + 1):
            name, page = run.letters[:end], run.pages.table[end - 1]
            known = {one.page for one in remembered.values()}
            if end > run.offered and name not in remembered and page not in known:
                carried = self.brute.add(name, page, now + run.retain_s, carried or before, now)
            if run.retain_s and name in remembered and remembered[name].page == page:
                remembered[name].until = max(remembered[name].until, now + run.retain_s)
        run.offered = len(run.letters)

    def end(self, run: Run, failed: bool) -> None:
        table, made = run.pages.table, run.pages._cached if failed else ()
        run.pages.end(failed=failed)
        brute = self.brute
        brute.remembered = {k: v for k, v in brute.remembered.items() if v.page not in made}
        brute.holders.remove(table)
        self.live.remove(run)
        for one in brute.remembered.values():
            if one.page in table and not brute.held(one.page):
                one.used = self.clock.now

    def agree(self) -> None:
        pool, brute = self.pages.pool, self.brute
        assert pool.free == brute.free()
        assert pool._references == [brute.held(page) for page in range(TOTAL)]
        names = {entry.name for entry in pool.prefix_cache._blocks.values()}
        keys = [key_of(spell(name)) for name in brute.remembered]
        assert names == {key.root + key.chain[-LINK_BYTES:] for key in keys}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_operations_agree_with_brute_force(data: st.DataObject) -> None:
    both = Both()
    chance = random.Random(0)  # so that no two waits are equal
    for _ in range(data.draw(st.integers(1, 60))):
        both.clock.now += 1.0 + chance.random()
        kind = data.draw(st.sampled_from(["read", "read", "end", "fail", "remember"]))
        if kind == "read":
            letters = data.draw(st.text("ab", min_size=1, max_size=6))
            both.read(letters, data.draw(st.sampled_from([0.0, 0.0, 0.0, 5.0])))
        elif both.live:
            run = data.draw(st.sampled_from(both.live))
            both.cache_prefix(run) if kind == "remember" else both.end(run, kind == "fail")
        both.agree()
    for run in list(both.live):
        both.end(run, failed=False)
    assert both.pages.pool.used == 0
