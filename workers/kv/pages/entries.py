"""Entries: full pages of K/V that are remembered after their requests, found by a prompt's root and chain.

A page that nobody holds is given up when its place is needed, the least recently used first. A prompt's last
page goes first, so that the pages left are still a beginning. Retained pages go after all others. Pure
accounting on the event loop's thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from deltafront.workers.messages.prompts import LINK_BYTES, PromptKey, links_of


@dataclass(slots=True)
class Entry:
    """A remembered page, the same object in each tier that has it.

    Attributes:
        name: The prompt's root and the page's link.
        until: When its retention ends, by the clock of `Entries`.
        place: The page's index in the prompt.
        before: The name of the page before it; empty for the first.
    """

    name: bytes
    until: float
    place: int
    before: bytes


class Entries:
    """The remembered pages of a pool. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pages: dict[bytes, int] = {}
        self._entries: dict[int, Entry] = {}
        self._idle: OrderedDict[int, float] = OrderedDict()
        """Pages that nobody holds, in the order in which they are given up, and when each was let go."""
        self._retained: OrderedDict[int, float] = OrderedDict()
        """The same for pages that are still retained."""
        self._soonest = float("inf")
        """The earliest end of a retention in `_retained`."""
        self.evicted = 0
        self.evicted_retained = 0
        """Evicted pages that were still retained: all others were gone or held."""
        self.evicted_age_s = 0.0
        self.on_idle: Callable[[Sequence[int]], None] = lambda _pages: None
        """Called with pages that nobody holds any more, in the order in which they are given up."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, page: int) -> bool:
        return page in self._entries

    @property
    def idle(self) -> int:
        return len(self._idle) + len(self._retained)

    def find(self, key: PromptKey, first: int = 0) -> tuple[tuple[int, ...], bool]:
        """Return the pages of a prompt's longest remembered beginning, from page `first` on.

        A page of the prompt's own method is preferred to one of dense attention.

        Returns:
            The pages, and whether dense attention made all of them.
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
        """Remember held pages, from the chain's link `first` on. Names and pages that are already here stay
        as they are.

        Returns:
            The pages that are new.
        """
        now, new = self._clock(), list[int]()
        before = root + chain[(first - 1) * LINK_BYTES : first * LINK_BYTES] if first else b""
        links = links_of(chain[first * LINK_BYTES :])
        for place, (link, page) in enumerate(zip(links, islice(pages, first, None), strict=False), first):
            name = root + link
            if name not in self._pages and page not in self._entries:
                self._pages[name], self._entries[page] = page, Entry(name, now + retain_s, place, before)
                new.append(page)
            before = name
        return new

    def enter(self, pages: Iterable[int], entries: Iterable[Entry]) -> None:
        """Remember held pages under entries of another tier. Names and pages that are already here stay as
        they are."""
        for page, entry in zip(pages, entries, strict=True):
            if entry.name not in self._pages and page not in self._entries:
                self._pages[entry.name], self._entries[page] = page, entry

    def __getitem__(self, page: int) -> Entry:
        return self._entries[page]

    def get(self, page: int) -> Entry | None:
        return self._entries.get(page)

    def page_of(self, name: bytes) -> int | None:
        return self._pages.get(name)

    def retain(self, pages: Iterable[int], seconds: float) -> None:
        until = self._clock() + seconds
        for page in pages:
            if page in self._entries:
                self._entries[page].until = max(self._entries[page].until, until)

    def drop(self, pages: Iterable[int]) -> None:
        """Forget held pages, so that nobody finds them any more."""
        for page in pages:
            if page in self._entries:
                del self._pages[self._entries.pop(page).name]

    def let_go(self, pages: Iterable[int]) -> list[int]:
        """Note that nobody holds these pages any more. The first is given up first.

        Returns:
            The pages that are not remembered.
        """
        now, idle, others = self._clock(), list[int](), list[int]()
        for page in pages:
            entry = self._entries.get(page)
            if entry is None:
                others.append(page)
                continue
            idle.append(page)
            if entry.until > now:
                self._retained[page] = now
                self._soonest = min(self._soonest, entry.until)
            else:
                self._idle[page] = now
        self.on_idle(idle)
        return others

    def take(self, pages: Iterable[int]) -> None:
        """Note that somebody holds these pages again."""
        for page in pages:
            self._idle.pop(page, None)
            self._retained.pop(page, None)

    def evict(self, count: int) -> list[int]:
        """Give up and forget `count` pages that nobody holds."""
        self._end_retention()
        unretained = min(count, len(self._idle))
        given_up = [self._idle.popitem(last=False) for _ in range(unretained)]
        given_up += [self._retained.popitem(last=False) for _ in range(count - unretained)]
        gone = [page for page, _let_go in given_up]
        self.evicted += count
        self.evicted_retained += count - unretained
        self.evicted_age_s += count * self._clock() - sum(let_go for _page, let_go in given_up)
        self.drop(gone)
        return gone

    def clear(self) -> list[int]:
        """Forget everything, and return the pages that nobody holds."""
        gone = [*self._idle, *self._retained]
        self._idle.clear()
        self._retained.clear()
        self._pages.clear()
        self._entries.clear()
        return gone

    def _end_retention(self) -> None:
        now = self._clock()
        if now < self._soonest:
            return
        over = [page for page in self._retained if self._entries[page].until <= now]
        idle = [*self._idle.items(), *((page, self._retained.pop(page)) for page in over)]
        self._idle = OrderedDict(sorted(idle, key=lambda one: one[1]))
        left = (self._entries[page].until for page in self._retained)
        self._soonest = min(left, default=float("inf"))
