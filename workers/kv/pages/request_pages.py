"""The pages of one request until they return to the pool. Only the event loop's thread uses this module."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from deltafront.workers.kv.pages.host_tier import PagesBack
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, PagePool
from deltafront.workers.kv.pages.state_slots import RequestStates
from deltafront.workers.messages.prompts import LINK_BYTES, PromptKey
from deltafront.workers.messages.requests import DecodeFailed

PageCopy = tuple[int, int]
"""(source page, target page)."""


class RequestPages:
    """The page table of one request, and its other pages.

    All work that accesses the pages runs inside `use`, since the request may end meanwhile. A copy from host
    memory counts as a use. The pages return to the pool after `end` and the last use.

    Args:
        table: The pages in the order of the request's tokens.
        held_tokens: Number of tokens of the session or cached prefix. Their KV is in the pages from the
            start, or once the copies in `coming` are complete.
        key: The prompt's prefix-cache key; None: its pages are not cached.
        exact: True if all of the request's KV is prefilled densely.
        spare: A page into which the partly filled last page of a session is copied, if the request makes one.
        copy_in: Source and target of the copy of a session's partly filled last page, before new tokens.
        session_token_ids: Token ids of the session, little-endian uint32; empty if unknown.
        own: Reserved pages that `divert` puts into the table for recomputed blocks.
        coming: Running copies from host memory into the table's pages, for any request.
        host_tokens: Number of tokens whose KV is copied from host memory for this request.
        states: The request's state slots; None if the model's layers have none.

    Attributes:
        copy_out: Source and target (`spare`) of the copy for a session that this request makes. It is made
            once the prompt is complete.
        original_table: The table before `divert`. Sessions and cached blocks use its pages.
        on_free: Called once, when the pages return to the pool.
        on_coming: Called when layers have arrived from host memory, or a copy has failed.
        freed: Set when the pages have returned to the pool.
    """

    def __init__(
        self,
        pool: PagePool,
        table: tuple[int, ...],
        held_tokens: int,
        *,
        key: PromptKey | None = None,
        exact: bool = True,
        spare: tuple[int, ...] = (),
        copy_in: PageCopy | None = None,
        session_token_ids: bytes = b"",
        own: tuple[int, ...] = (),
        coming: tuple[PagesBack, ...] = (),
        host_tokens: int = 0,
        states: RequestStates | None = None,
    ) -> None:
        self.states = states
        self._pool, self._key, self._exact = pool, key, exact
        self.table = self.original_table = table
        self.held_tokens, self.host_tokens = held_tokens, host_tokens
        self.session_token_ids = session_token_ids
        self.spare, self.copy_in, self._coming = spare, copy_in, coming
        self.copy_out: PageCopy | None = None
        self.on_free: Callable[[], None] = lambda: None
        self.on_coming: Callable[[], None] = lambda: None
        self.freed = asyncio.Event()
        self._own = own
        self._aside: tuple[int, ...] = ()  # pages that `divert` has removed from the table
        self._cached: list[int] = []  # pages that this request has put into the prefix cache
        self._offered = held_tokens // PAGE_TOKENS  # number of first pages offered to the prefix cache
        self._ended, self._users = False, len(coming)
        self._unused, self._came = asyncio.Event(), asyncio.Event()
        for copy in coming:
            copy.watch(partial(self._has_come, copy))

    @property
    def count(self) -> int:
        return len(self.table) + len(self.spare) + len(self._own) + len(self._aside)

    @property
    def every_page(self) -> tuple[int, ...]:
        """All pages to which the request has a reference, including the source of `copy_in`."""
        source = () if self.copy_in is None else self.copy_in[:1]
        return (*self.table, *self.spare, *self._own, *self._aside, *source)

    @property
    def layers_coming(self) -> int:
        """Number of layers, the model's last ones, whose KV has not yet arrived from host memory."""
        return max((coming.left for coming in self._coming), default=0)

    @property
    def lost(self) -> str:
        """The error of a failed copy from host memory; empty if none has failed."""
        why = next((coming.error for coming in self._coming if coming.error), "")
        return why and f"KV did not come back from host memory: {why}"

    async def come(self, left: int = 0) -> None:
        """Wait until KV of all but the last `left` layers has arrived from host memory. Raises
        DecodeFailed."""
        while self.layers_coming > left and not self.lost:
            await self._came.wait()
        if self.lost:
            raise DecodeFailed(self.lost)

    def _has_come(self, coming: PagesBack) -> None:
        came, self._came = self._came, asyncio.Event()
        came.set()
        if coming.over:
            self._used()
        self.on_coming()

    def divert(self, places: Sequence[int]) -> None:
        """Replace the table's pages at these indices by unshared ones, for recomputed blocks.

        The replaced pages return to the pool with the request's other pages. No later step writes to them.

        Raises:
            ValueError: More pages than were reserved for this.
        """
        if len(places) > len(self._own):
            raise ValueError(f"{len(places)} places of the table, but {len(self._own)} own pages")
        table, used = list(self.table), self._own[: len(places)]
        for place, page in zip(places, used, strict=True):
            self._aside += (table[place],)
            table[place] = page
        self.table, self._own = tuple(table), self._own[len(places) :]

    @contextmanager
    def use(self) -> Iterator[tuple[int, ...] | None]:
        """Yield the page table, and keep its pages allocated during the `with` block. Yields None if the
        request has ended."""
        if self._ended:
            yield None
            return
        self._users += 1
        self._unused.clear()
        try:
            yield self.table
        finally:
            self._used()

    def _used(self) -> None:
        self._users -= 1
        if not self._users:
            self._unused.set()
        self._free_if_idle()

    async def unused(self) -> None:
        while self._users:
            await self._unused.wait()

    def cache_prefix(self, tokens: int, answer_ids: bytes = b"", *, ends: bool = False) -> None:
        """Put the full pages of the first `tokens` tokens into the prefix cache. The caller must not write to
        these pages afterwards. Does nothing after `end`, or if the key is None or not `remembers`.

        Args:
            answer_ids: Token ids after the prompt, little-endian uint32.
            ends: True if the request ends here.
        """
        if self._key is None or not self._key.remembers or self._ended:
            return
        chain = self._key.longer(answer_ids) if answer_ids else self._key.chain
        root = self._key.exact_root if self._exact else self._key.root
        pages, cache = self.original_table[: tokens // PAGE_TOKENS], self._pool.prefix_cache
        self._cached += cache.add(root, chain, pages, self._key.retain_s, self._offered)
        if self._key.retain_s:
            cache.retain(pages, self._key.retain_s)
        self._offered = len(pages)
        if self.states is not None:

            def name(tokens: int) -> bytes | None:
                block, rest = divmod(tokens, PAGE_TOKENS)
                if rest or not 0 < block <= min(len(pages), len(chain) // LINK_BYTES):
                    return None
                return root + chain[(block - 1) * LINK_BYTES : block * LINK_BYTES]

            self.states.cache(name, ends=ends)

    def end(self, *, failed: bool = False) -> None:
        """End the request. If it failed, remove its pages from the prefix cache."""
        if failed:
            self._pool.prefix_cache.drop(self._cached)
            if self.states is not None:
                self.states.forget()
        self._ended = True
        self._free_if_idle()

    def _free_if_idle(self) -> None:
        if self._ended and self._users == 0 and not self.freed.is_set():
            # In token order, since the page that is released last is evicted first.
            self._pool.release(dict.fromkeys((*self.original_table, *self.every_page)))
            self.table, self.spare, self._own, self._aside = (), (), (), ()
            self.copy_in = self.copy_out = None
            if self.states is not None:
                self.states.free()
            self.freed.set()
            self.on_free()
