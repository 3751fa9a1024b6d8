"""The prefix cache: full KV pages that are kept after their requests, found by a prompt's root and hash
chain.

When space is needed, the least recently used page without references is evicted. A prompt's last page is
evicted before its first, so that the remaining pages are still a prefix. Retained pages are evicted after all
others. Only the event loop's thread uses this module.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from deltafront.workers.messages.prompts import LINK_BYTES, PromptKey, links_of


@dataclass(slots=True)
class CachedBlock:
    """A cached block. All tiers that hold its KV share this object.

    Attributes:
        name: The prompt's root and the page's link in the hash chain.
        until: The time at which its retention ends, by the clock of `PrefixCache`.
        place: The page's index in the prompt.
        before: The name of the previous page; empty for the first.
    """

    name: bytes
    until: float
    place: int
    before: bytes


class PrefixCache:
    """The cached pages of a pool. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pages: dict[bytes, int] = {}
        self._blocks: dict[int, CachedBlock] = {}
        self._idle: OrderedDict[int, float] = OrderedDict()
        """Evictable pages in the order of eviction, each with the time at which it was unpinned."""
        self._retained: OrderedDict[int, float] = OrderedDict()
        """Evictable pages that are retained, each with the time at which it was unpinned."""
        self._soonest = float("inf")
        """The earliest time at which the retention of a page in `_retained` ends."""
        self.evicted = 0
        self.evicted_retained = 0
        """Number of pages that were evicted although still retained."""
        self.evicted_age_s = 0.0
        self.on_evictable: Callable[[Sequence[int]], None] = lambda _pages: None
        """Called with pages that have become evictable, in the order of their eviction."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, page: int) -> bool:
        return page in self._blocks

    @property
    def evictable(self) -> int:
        return len(self._idle) + len(self._retained)

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
        links = links_of(chain[first * LINK_BYTES :])
        for place, (link, page) in enumerate(zip(links, islice(pages, first, None), strict=False), first):
            name = root + link
            if name not in self._pages and page not in self._blocks:
                self._pages[name], self._blocks[page] = page, CachedBlock(name, now + retain_s, place, before)
                new.append(page)
            before = name
        return new

    def restore(self, pages: Iterable[int], blocks: Iterable[CachedBlock]) -> None:
        """Cache pinned pages as blocks that another tier holds. Names and pages that are already cached stay
        unchanged."""
        for page, block in zip(pages, blocks, strict=True):
            if block.name not in self._pages and page not in self._blocks:
                self._pages[block.name], self._blocks[page] = page, block

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
                del self._pages[self._blocks.pop(page).name]

    def unpin(self, pages: Iterable[int]) -> list[int]:
        """Make cached pages evictable. The first of `pages` is evicted first.

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
            if block.until > now:
                self._retained[page] = now
                self._soonest = min(self._soonest, block.until)
            else:
                self._idle[page] = now
        self.on_evictable(idle)
        return others

    def pin(self, pages: Iterable[int]) -> None:
        """Protect these pages from eviction until `unpin`."""
        for page in pages:
            self._idle.pop(page, None)
            self._retained.pop(page, None)

    def evict(self, count: int) -> list[int]:
        """Evict `count` evictable pages, and return them."""
        self._end_retention()
        unretained = min(count, len(self._idle))
        evicted = [self._idle.popitem(last=False) for _ in range(unretained)]
        evicted += [self._retained.popitem(last=False) for _ in range(count - unretained)]
        gone = [page for page, _unpinned in evicted]
        self.evicted += count
        self.evicted_retained += count - unretained
        self.evicted_age_s += count * self._clock() - sum(unpinned for _page, unpinned in evicted)
        self.drop(gone)
        return gone

    def clear(self) -> list[int]:
        """Remove all pages from the cache, and return the evictable ones."""
        gone = [*self._idle, *self._retained]
        self._idle.clear()
        self._retained.clear()
        self._pages.clear()
        self._blocks.clear()
        return gone

    def _end_retention(self) -> None:
        now = self._clock()
        if now < self._soonest:
            return
        over = [page for page in self._retained if self._blocks[page].until <= now]
        idle = [*self._idle.items(), *((page, self._retained.pop(page)) for page in over)]
        self._idle = OrderedDict(sorted(idle, key=lambda one: one[1]))
        left = (self._blocks[page].until for page in self._retained)
        self._soonest = min(left, default=float("inf"))
