"""The pool of one worker's KV pages, and helpers for runs of contiguous pages. One thread uses it.

Pages have reference counts, because requests with the same prefix share them. A page without references
counts as free, even if it is still in the prefix cache.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.workers.kv.pages.prefix_cache import PrefixCache

__all__ = [
    "PAGE_TOKENS",
    "OutOfPages",
    "PagePool",
    "first_of_run",
    "page_runs",
    "pages_for",
    "paired_runs",
    "row_runs",
]


class OutOfPages(Exception):
    """Too few pages are free. None has been allocated."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} KV pages are needed but only {free} are free")
        self.needed = needed
        self.free = free

    def __reduce__(self) -> tuple[type[OutOfPages], tuple[int, int]]:
        return type(self), (self.needed, self.free)


def pages_for(tokens: int) -> int:
    if tokens < 0:
        raise ValueError(f"a number of tokens cannot be negative: {tokens}")
    return -(-tokens // PAGE_TOKENS)


def first_of_run(pages: Sequence[int]) -> int | None:
    if not pages or any(b - a != 1 for a, b in itertools.pairwise(pages)):
        return None
    return pages[0]


def row_runs(pages: Sequence[int], start: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """Group the cache rows of tokens start .. start+tokens-1 into contiguous runs of (first row, count).

    Raises:
        ValueError: The pages do not hold these tokens.
    """
    if start < 0 or tokens < 1 or start + tokens > len(pages) * PAGE_TOKENS:
        raise ValueError(f"tokens {start} .. {start + tokens - 1} are not in {len(pages)} pages")
    runs: list[tuple[int, int]] = []
    end = start + tokens
    while start < end:
        page, slot = divmod(start, PAGE_TOKENS)
        row, count = pages[page] * PAGE_TOKENS + slot, min(PAGE_TOKENS - slot, end - start)
        if runs and sum(runs[-1]) == row:
            row, count = runs[-1][0], runs.pop()[1] + count
        runs.append((row, count))
        start += min(PAGE_TOKENS - slot, end - start)
    return tuple(runs)


def paired_runs(
    theirs: Sequence[tuple[int, int]], ours: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Split two lists of runs with equal totals into pieces that are contiguous in both.

    Yields (first row in `theirs`, first row in `ours`, count).
    """
    left, right = deque(theirs), deque(ours)
    while left and right:
        (a, rows_a), (b, rows_b) = left.popleft(), right.popleft()
        count = min(rows_a, rows_b)
        yield a, b, count
        if rows_a > count:
            left.appendleft((a + count, rows_a - count))
        if rows_b > count:
            right.appendleft((b + count, rows_b - count))


def page_runs(pages: Sequence[int], slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """Group pairs of page and slot where both are consecutive, as (first page, first slot, count)."""
    runs: list[tuple[int, int, int]] = []
    first = beside = count = 0
    for page, slot in zip(pages, slots, strict=True):
        if count and page == first + count and slot == beside + count:
            count += 1
            continue
        if count:
            runs.append((first, beside, count))
        first, beside, count = page, slot, 1
    return [*runs, (first, beside, count)] if count else runs


class PagePool:
    """Allocates pages, lowest number first, so that a request's pages are contiguous where possible.

    Cached pages are evicted only when no other page is free. `on_free` is called when pages become free.
    """

    def __init__(
        self, pages: int, on_free: Callable[[], None] = lambda: None, prefix_cache: PrefixCache | None = None
    ) -> None:
        if pages < 1:
            raise ValueError(f"a pool needs pages, got {pages}")
        self._on_free = on_free
        self.prefix_cache = PrefixCache(time.monotonic) if prefix_cache is None else prefix_cache
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))  # highest first, since `allocate` takes from the end

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        """Number of free pages, including the evictable pages of the prefix cache."""
        return len(self._free) + self.prefix_cache.evictable

    @property
    def used(self) -> int:
        return self.total - self.free

    def unheld(self, pages: Iterable[int]) -> int:
        """Count the pages that have no reference."""
        return sum(not self._references[page] for page in pages)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` pages. Raises OutOfPages."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self.free:
            raise OutOfPages(count, self.free)
        if count > len(self._free):
            self._free += self.prefix_cache.evict(count - len(self._free))
            self._free.sort(reverse=True)
        left = len(self._free) - count
        taken = tuple(reversed(self._free[left:]))
        del self._free[left:]
        for page in taken:
            self._references[page] = 1
        return taken

    def incref(self, pages: Iterable[int]) -> None:
        """Add one reference to each page. Raises ValueError and changes nothing if a page is neither in use
        nor cached."""
        held = self._checked(pages)
        idle = [page for page in held if not self._references[page]]
        for page in idle:
            if page not in self.prefix_cache:
                raise ValueError(f"page {page} is free and cannot be shared")
        self.prefix_cache.pin(idle)
        for page in held:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page. Cached pages that become free are evicted last page first.

        Raises:
            ValueError: A page has fewer references than are dropped. Nothing is changed.
        """
        drops = Counter(self._checked(pages))
        for page, drop in drops.items():
            if drop > self._references[page]:
                raise ValueError(
                    f"page {page} is released {drop} times but has {self._references[page]} holders"
                )
        for page, drop in drops.items():
            self._references[page] -= drop
        freed = [page for page in drops if not self._references[page]]
        self._free += self.prefix_cache.unpin(reversed(freed))
        self._free.sort(reverse=True)  # fast, since both parts are mostly sorted
        if freed:
            self._on_free()

    def clear_prefix_cache(self) -> None:
        self._free += self.prefix_cache.clear()
        self._free.sort(reverse=True)

    def _checked(self, pages: Iterable[int]) -> list[int]:
        checked = list(pages)
        for page in (min(checked, default=0), max(checked, default=0)):
            if not 0 <= page < self.total:
                raise ValueError(f"page {page} is not one of this pool's {self.total} pages")
        return checked
