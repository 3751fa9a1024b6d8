"""The order of eviction: what a block learns from its returns, and which goes first."""

from __future__ import annotations

import random

from deltafront.workers.kv.pages.eviction import CachedBlock, EvictionOrder, Pasts
from deltafront.workers.kv.pages.prefix_cache import PrefixCache

from ..prompts import Clock


def block(used: float, interval: float = 0.0, place: int = 0) -> CachedBlock:
    return CachedBlock(b"", 0.0, place, b"", used, interval)


def order_of(*blocks: CachedBlock, now: float) -> list[int]:
    order = EvictionOrder()
    for page, one in enumerate(blocks):
        order.add(page, one)
    return list(iter(lambda: order.pop(now), None))


def test_block_with_the_latest_expected_reuse_is_evicted_first() -> None:
    blocks = [block(100.0, 30.0), block(90.0, 60.0), block(110.0, 10.0)]
    assert order_of(*blocks, now=112.0) == [1, 0, 2]


def test_overdue_and_new_blocks_are_evicted_least_recently_used_first() -> None:
    blocks = [block(100.0), block(50.0, 20.0), block(80.0)]
    assert order_of(*blocks, now=112.0) == [1, 2, 0]


def test_new_block_is_evicted_before_one_expected_sooner_than_its_age() -> None:
    assert order_of(block(100.0, 30.0), block(90.0), now=112.0) == [1, 0]
    assert order_of(block(100.0, 40.0), block(90.0), now=112.0) == [0, 1]


def test_block_that_takes_longer_to_prefill_is_evicted_later() -> None:
    assert order_of(block(100.0, 30.0, 4096), block(100.0, 25.0), now=110.0) == [1, 0]
    assert order_of(block(100.0, 60.0, 4096), block(100.0, 25.0), now=110.0) == [0, 1]


def test_learned_reuse_interval_is_above_the_mean_time_between_hits() -> None:
    chance, one = random.Random(0), block(0.0)
    now = 0.0
    for _ in range(50):
        one.used = now
        now += chance.uniform(20.0, 40.0)
        one.returned(now)
    assert 30.0 < one.interval < 40.0
    one.used = now
    one.returned(now)
    assert 30.0 < one.interval < 40.0, "no absence, nothing to learn"


def test_discarded_entries_do_not_accumulate_in_the_eviction_order() -> None:
    order = EvictionOrder()
    for number in range(2_000):
        order.discard(number % 10)
        order.add(number % 10, block(float(number), number % 3 * 1.0))
    heaps = [order._due, *order._last_expected, *order._least_recent]
    assert sum(len(heap._entries) for heap in heaps) < 200
    assert sorted(iter(lambda: order.pop(2_000.0), None)) == list(range(10))


def test_evicted_blocks_history_forgets_the_oldest_blocks() -> None:
    pasts = Pasts()
    for number in range(20_000):
        pasts.keep(CachedBlock(number.to_bytes(4), 0.0, 0, b"", float(number), 1.0))
    assert pasts.take((0).to_bytes(4)) is None
    assert pasts.take((19_999).to_bytes(4)) == (19_999.0, 1.0)
    assert pasts.take((19_999).to_bytes(4)) is None


def test_shared_beginning_is_not_evicted_with_an_old_leaf() -> None:
    clock = Clock()
    cache = PrefixCache(clock)
    cache.add(b"", bytes(range(48)), [0, 1, 2], 0.0)
    cache.unpin([2, 1, 0])
    clock.now += 1.0
    cache.add(b"", b"b" * 16, [3], 0.0)
    cache.unpin([3])
    clock.now += 1.0
    cache.pin([0, 1])
    cache.unpin([1, 0])
    clock.now += 1.0
    assert cache.evict(2) == [2, 3], "page 1 is expected in a second"


def test_often_hit_retained_pages_have_one_expiry_entry_each() -> None:
    clock = Clock()
    cache = PrefixCache(clock)
    cache.add(b"", bytes(range(48)), [0, 1, 2], 3600.0)
    cache.unpin([2, 1, 0])
    for _ in range(100):
        clock.now += 1.0
        cache.pin([0, 1, 2])
        cache.retain([0, 1, 2], 3600.0)
        cache.unpin([2, 1, 0])
    assert len(cache._ends) == 3
    cache.clear()
    cache.add(b"", b"a" * 16, [0], 5.0)
    cache.unpin([0])
    clock.now += 1.0
    cache.add(b"", b"b" * 16, [1], 0.0)
    cache.unpin([1])
    clock.now += 6.0
    assert cache.evict(1) == [0], "its retention is over, and it is older"


def test_page_that_a_lower_tier_has_not_copied_is_evicted_last() -> None:
    clock = Clock()
    cache = PrefixCache(clock)
    offered: list[int] = []
    cache.on_evictable = offered.extend
    for page in range(3):
        cache.add(bytes([page]), bytes(16), [page], 0.0)
        cache.unpin([page])
        clock.now += 1.0
    cache.settle(offered[1:])
    assert (cache.evict(1), cache.evict(1), cache.evict(1)) == ([1], [2], [0])
