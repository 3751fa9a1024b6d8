"""The prefix cache: full KV pages that are kept after their requests, found by a prompt's root and hash
chain.

When space is needed, pages without references are evicted in the order of `eviction.py`. A page is evicted
after the cached pages that follow it in a prompt, so that the remaining pages are still a prefix. Retained
pages are evicted after all others. Only the event loop's thread uses this module.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from deltafront.workers.kv.pages.eviction import REMEMBERED_PAGES, CachedBlock, EvictionOrder, Pasts
from deltafront.workers.messages.prompts import LINK_BYTES, PromptKey, links_of


@dataclass(frozen=True, slots=True)
class _Evictable:
    """Evictable pages and their eviction order.

    `pages` maps each evictable page to True once it is settled (`PrefixCache.settle`). `order` has the
    settled pages that no cached page follows.
    """

    pages: dict[int, bool] = field(default_factory=dict)
    order: EvictionOrder = field(default_factory=EvictionOrder)


class PrefixCache:
    """The cached pages of a pool.

    Args:
        clock: Returns seconds.
        above: The prefix cache of the tier above (the GPU's, for host memory). Both share blocks, and the
            tier above records their uses.
        learns: True if blocks learn their reuse interval (`eviction`). If not, the least recently used block
            is evicted first. Ignored with `above`.
    """

    def __init__(
        self, clock: Callable[[], float], *, above: PrefixCache | None = None, learns: bool = True
    ) -> None:
        self._clock, self._above, self._learns = clock, above, learns and above is None
        self._pasts: Pasts = Pasts() if above is None else above._pasts
        self._pages: dict[bytes, int] = {}
        self._blocks: dict[int, CachedBlock] = {}
        self._following: dict[bytes, int] = {}
        """By a page's name: the number of cached pages that directly follow it in prompts."""
        self._idle, self._retained = _Evictable(), _Evictable()
        self._ends: list[tuple[float, int]] = []
        """A heap of the times at which a retained page's retention may end."""
        self._soonest: dict[int, float] = {}
        """The earliest of these times for each page."""
        self.evicted = 0
        self.evicted_retained = 0
        """Number of pages that were evicted although still retained."""
        self.evicted_age_s = 0.0
        self.on_evictable: Callable[[Sequence[int]], None] = self.settle
        """Called with pages that have become evictable, each before the page that it follows. Until `settle`
        is called for them, other pages are evicted first."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, page: int) -> bool:
        return page in self._blocks

    @property
    def evictable(self) -> int:
        return len(self._idle.pages) + len(self._retained.pages)

    def find(self, key: PromptKey, first: int = 0) -> tuple[tuple[int, ...], bool]:
        """Return the pages of a prompt's longest cached prefix, from page `first` on.

        A page that the prompt's own attention method has prefilled is preferred to a densely prefilled one.

        Returns:
            The pages, and whether all of them were prefilled densely.
        """
        pages: list[int] = []
        exact, root, page_of = True, key.root, self._pages.get
        for link in links_of(key.chain[first * LINK_BYTES :]):
            page = page_of(root + link)
            if page is None:
                page = page_of(key.exact_root + link)
            elif not key.exact:
                exact = False
            if page is None:
                break
            pages.append(page)
        return tuple(pages), exact

    def add(
        self, root: bytes, chain: bytes, pages: Sequence[int], retain_s: float, first: int = 0
    ) -> Iterable[int]:
        """Cache a prompt's pinned pages from page `first` on. Names and pages that are already cached stay
        unchanged.

        Returns:
            The newly cached pages.
        """
        now, new = self._clock(), list[int]()
        before = root + chain[(first - 1) * LINK_BYTES : first * LINK_BYTES] if first else b""
        used, interval = math.inf, self._interval_of(before)
        links = links_of(chain[first * LINK_BYTES :])
        for place, (link, page) in enumerate(zip(links, islice(pages, first, None), strict=False), first):
            name = root + link
            if name not in self._pages and page not in self._blocks:
                if not place % REMEMBERED_PAGES:
                    used, interval = self._pasts.take(name) or (used, interval)
                self._hold(page, CachedBlock(name, now + retain_s, place, before, used, interval), now)
                new.append(page)
            before = name
        return new

    def restore(self, pages: Iterable[int], blocks: Iterable[CachedBlock]) -> None:
        """Cache pinned pages as blocks that another tier holds. Names and pages that are already cached stay
        unchanged."""
        now = self._clock()
        for page, block in zip(pages, blocks, strict=True):
            if block.name not in self._pages and page not in self._blocks:
                self._hold(page, block, now)

    def _interval_of(self, name: bytes) -> float:
        page = self._pages.get(name)
        return 0.0 if page is None else self._blocks[page].interval

    def _hold(self, page: int, block: CachedBlock, now: float) -> None:
        self._pages[block.name], self._blocks[page] = page, block
        if self._learns and block.used != math.inf:
            block.returned(now)
        if before := block.before:
            others = self._following.get(before, 0)
            self._following[before] = others + 1
            if not others and (evictable := self._evictable(self._pages.get(before))):
                evictable.order.discard(self._pages[before])

    def _evictable(self, page: int | None) -> _Evictable | None:
        if page in self._idle.pages:
            return self._idle
        return self._retained if page in self._retained.pages else None

    def __getitem__(self, page: int) -> CachedBlock:
        return self._blocks[page]

    def get(self, page: int) -> CachedBlock | None:
        return self._blocks.get(page)

    def page_of(self, name: bytes) -> int | None:
        return self._pages.get(name)

    def retain(self, pages: Iterable[int], seconds: float) -> None:
        """For `seconds`, evict these pages only after all others. A longer retention stays in force."""
        until = self._clock() + seconds
        for page in pages:
            if page in self._blocks:
                self._blocks[page].until = max(self._blocks[page].until, until)

    def drop(self, pages: Iterable[int]) -> None:
        """Remove pinned pages from the cache, so that no prompt finds them."""
        for page in pages:
            if page in self._blocks:
                self._rank(self._remove(page))

    def _remove(self, page: int) -> int | None:
        """Remove a page. Returns the page before it in the prompt, if that page is cached and no other cached
        page follows it."""
        block = self._blocks.pop(page)
        del self._pages[block.name]
        others = self._following.pop(block.before, 1) - 1
        if others:
            self._following[block.before] = others
            return None
        return self._pages.get(block.before)

    def _rank(self, page: int | None) -> None:
        """Add a page that no cached page follows to the eviction order, if it is evictable and settled."""
        evictable = self._evictable(page)
        if page is not None and evictable is not None and evictable.pages[page]:
            evictable.order.add(page, self._blocks[page])

    def unpin(self, pages: Iterable[int]) -> list[int]:
        """Make cached pages evictable. `pages` lists each page before the page that it follows.

        Returns:
            Those of `pages` that are not cached.
        """
        now, idle, others = self._clock(), list[int](), list[int]()
        for page in pages:
            block = self._blocks.get(page)
            if block is None:
                others.append(page)
                continue
            idle.append(page)
            if self._above is None or block.used == math.inf:
                block.used = now
            if block.until > now:
                self._retained.pages[page] = False
                self._push_end(page, block.until)
            else:
                self._idle.pages[page] = False
        self.on_evictable(idle)
        return others

    def settle(self, pages: Iterable[int]) -> None:
        """Put evictable pages into the eviction order: the tier below has copied them, or there is no tier
        below.

        Evictable pages that are not settled are evicted only if the eviction order is empty.
        """
        for page in pages:
            evictable = self._evictable(page)
            if evictable is not None:
                evictable.pages[page] = True
                if self._blocks[page].name not in self._following:
                    evictable.order.add(page, self._blocks[page])

    def pin(self, pages: Iterable[int]) -> None:
        """Protect these pages from eviction until `unpin`."""
        now = self._clock()
        for page in pages:
            evictable = self._evictable(page)
            if evictable is not None:
                del evictable.pages[page]
                evictable.order.discard(page)
                if self._learns:
                    self._blocks[page].returned(now)

    def evict(self, count: int) -> list[int]:
        """Evict `count` evictable pages, and return them."""
        now = self._clock()
        self._end_retention(now)
        gone: list[int] = []
        for evictable in (self._idle, self._retained):
            before = len(gone)
            while len(gone) < count and evictable.pages:
                gone += self._evict_run(evictable, count - len(gone), now)
        self.evicted += count
        self.evicted_retained += len(gone) - before
        return gone

    def _evict_run(self, evictable: _Evictable, most: int, now: float) -> list[int]:
        """Evict the first page of the order, then the pages before it in its prompt that are settled and rank
        equally: at most `most` pages. Returns the evicted pages."""
        page = evictable.order.pop(now)
        if page is None:  # a page that is in use follows each, or a tier below copies them
            page = next(iter(evictable.pages))
        run: list[int] = []
        first = self._blocks[page]
        while len(run) < most:
            block = self._blocks[page]
            if (run and not evictable.pages.get(page)) or not block.ranks_as(first):
                break
            del evictable.pages[page]
            if not block.place % REMEMBERED_PAGES:
                self._pasts.keep(block)
            run.append(page)
            before = self._remove(page)
            if before is None:
                break
            page = before
        self.evicted_age_s += len(run) * (now - first.used)
        self._rank(page)
        return run

    def clear(self) -> list[int]:
        """Remove all pages from the cache, and return the evictable ones."""
        gone = [*self._idle.pages, *self._retained.pages]
        self._idle, self._retained = _Evictable(), _Evictable()
        self._ends.clear()
        self._soonest.clear()
        self._following.clear()
        self._pages.clear()
        self._blocks.clear()
        return gone

    def _push_end(self, page: int, until: float) -> None:
        if until < self._soonest.get(page, math.inf):
            self._soonest[page] = until
            heapq.heappush(self._ends, (until, page))

    def _end_retention(self, now: float) -> None:
        over = set[int]()
        while self._ends and self._ends[0][0] <= now:
            end, page = heapq.heappop(self._ends)
            if self._soonest.get(page) == end:
                del self._soonest[page]
            if page not in self._retained.pages:
                continue
            until = self._blocks[page].until
            if until > now:
                self._push_end(page, until)
            else:
                over.add(page)
        # In the order in which they became evictable, which has a prompt's last page before its first.
        for page in [page for page in self._retained.pages if page in over] if over else ():
            self._idle.pages[page] = self._retained.pages.pop(page)
            self._retained.order.discard(page)
            if self._blocks[page].name not in self._following:
                self._rank(page)
