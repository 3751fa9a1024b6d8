"""Reserves pages for requests. A request gets all pages that it can ever need at once.

It shares the full pages of a session or cached prefix and never writes to them. A session's partly filled
last page is copied. Recomputed blocks get unshared pages. Only the event loop's thread uses this module.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from deltafront.workers.kv.pages.host_tier import HostTier, PagesBack
from deltafront.workers.kv.pages.leases import Lease, Leases
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, OutOfPages, PagePool, pages_for
from deltafront.workers.kv.pages.state_slots import OutOfSlots, RequestStates, StateSlots
from deltafront.workers.messages.prompts import LINK_BYTES, PromptKey
from deltafront.workers.messages.requests import (
    DecodeFailed,
    RefusalReason,
    Refused,
    Reservation,
    recompute_pages,
)

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


@dataclass(frozen=True, kw_only=True)
class _Held:
    """The KV that a request shares from the start, from a session or a cached prefix.

    Attributes:
        pages: The full pages on the GPU.
        slots: Slots of host memory with the KV after these pages.
        partly_filled: A session's last page if it is not full, else None.
        may_recompute: True if blocks can be recomputed, which needs the token ids.
        state: The slot of the state after these tokens; None: the model has none, or there are no tokens.
    """

    tokens: int = 0
    pages: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    partly_filled: int | None = None
    token_ids: bytes = b""
    exact: bool = True
    may_recompute: bool = True
    state: int | None = None


class PageManager:
    """Reserves one worker's pages and keeps its sessions.

    Args:
        positions: The model's maximum context length in tokens.
        states: The slots of states; None if the model's layers have none.
    """

    def __init__(
        self, pool: PagePool, leases: Leases, positions: int, states: StateSlots | None = None
    ) -> None:
        self.pool = pool
        self.states = states
        self.host: HostTier | None = None
        """The prefix cache's tier in host memory, if there is one."""
        self.leases = leases
        self._positions = positions

    def reserve(self, reservation: Reservation, now: float, waiting: int = 0) -> RequestPages | Refused:
        """Reserve all pages of a request, or refuse it. If `waiting` is not 0, it is refused in any case.

        Args:
            now: Seconds since the epoch.
            waiting: Number of other reservations that wait for pages.

        Raises:
            ValueError: The reservation's token counts contradict one another.
        """
        _check_counts(reservation)
        self.leases.expire(now)
        held = self._held(reservation, now)
        if isinstance(held, Refused):
            return held
        before = held.tokens
        total = before + reservation.new_tokens + reservation.resume_tokens + reservation.max_tokens
        if total > self._positions:
            return Refused(
                reason=RefusalReason.POSITIONS,
                message=f"{before} session tokens, {reservation.new_tokens} prompt tokens and "
                f"{reservation.max_tokens} new tokens exceed the model's {self._positions} positions",
                tokens_left=max(0, self._positions - (total - reservation.max_tokens)),
            )
        return self._take(reservation, held, total, waiting)

    def find(self, key: PromptKey) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Find a prompt's longest cached prefix. If the model's layers have states, it ends where
        one is cached, before the prompt's last token.

        Returns:
            Its pages on the GPU, the slots of host memory with the KV after them, and whether all of it was
                prefilled densely.
        """
        pages, exact = self.pool.prefix_cache.find(key)
        if self.states is not None:
            return self._until_a_state(pages, key), (), exact
        if self.host is None:
            return pages, (), exact
        slots, also_exact = self.host.find(key, len(pages))
        return pages, slots, exact and also_exact

    def _until_a_state(self, pages: tuple[int, ...], key: PromptKey) -> tuple[int, ...]:
        last = len(key.chain) // LINK_BYTES - (not key.tail)
        return pages[: self.last_state(pages[:last])]

    def last_state(self, pages: Sequence[int], step: int = 1) -> int:
        """Return the largest number of these cached pages, a multiple of `step`, after which a state is
        cached; 0: none."""
        counts = range(len(pages) // step * step, 0, -step)
        return next((count for count in counts if self._state_after(pages[count - 1])), 0)

    def _state_after(self, page: int) -> int | None:
        """Return the slot of the cached state at the end of a cached page."""
        return None if self.states is None else self.states.find(self.pool.prefix_cache[page].name)

    def _held(self, reservation: Reservation, now: float) -> _Held | Refused:
        if reservation.session_id is not None:
            return self._session(reservation.session_id, reservation.owner, now)
        if not reservation.prefix_tokens:
            return _Held()
        count = reservation.prefix_tokens // PAGE_TOKENS
        pages, slots, exact = ((), (), True) if reservation.key is None else self.find(reservation.key)
        if len(pages) + len(slots) < count:
            message = f"{reservation.prefix_tokens} tokens of the prompt are no longer in the prefix cache"
            return Refused(reason=RefusalReason.NO_PREFIX, message=message)
        pages = pages[:count]
        slots = slots[: count - len(pages)]
        state = None
        if self.states is not None and (state := self._state_after(pages[-1])) is None:
            message = f"the state after {reservation.prefix_tokens} tokens of the prompt is no longer cached"
            return Refused(reason=RefusalReason.NO_PREFIX, message=message)
        return _Held(tokens=reservation.prefix_tokens, pages=pages, slots=slots, exact=exact, state=state)

    def _session(self, session_id: str, owner: str, now: float) -> _Held | Refused:
        lease = self.leases.find(session_id, owner, now)
        if lease is None:
            message = f"session {session_id} does not exist or has expired"
            return Refused(reason=RefusalReason.NO_SESSION, message=message)
        full, rest = divmod(lease.tokens, PAGE_TOKENS)
        return _Held(
            tokens=lease.tokens,
            pages=lease.pages[:full],
            partly_filled=lease.pages[-1] if rest else None,
            token_ids=lease.token_ids,
            may_recompute=bool(lease.token_ids),
            state=lease.state,
        )

    def _take(
        self, reservation: Reservation, held: _Held, total: int, waiting: int
    ) -> RequestPages | Refused:
        shared = held.pages
        spare = 1 if reservation.keep_tokens % PAGE_TOKENS else 0
        fresh = pages_for(total) - len(shared)
        own = 0
        if held.may_recompute:
            known = held.tokens if reservation.reads else held.tokens + reservation.new_tokens
            own = recompute_pages(reservation.options.recompute_blocks, known, appended=reservation.reads)
        # A session's partly filled page stays allocated in addition to its copy.
        least = pages_for(total) + spare + own + (held.partly_filled is not None)
        if least > self.pool.total:
            message = f"{least} KV pages are needed, this worker has {self.pool.total} in all"
            return Refused(reason=RefusalReason.TOO_LARGE, message=message, needed=least, free=self.pool.free)
        needed = fresh + spare + own
        source = () if held.partly_filled is None else (held.partly_filled,)
        if waiting:
            message = f"{waiting} reservations wait for KV pages already"
            return Refused(reason=RefusalReason.PAGES, message=message, needed=needed, free=self.pool.free)
        free = self.pool.free - self.pool.unheld(shared)
        if needed > free:
            message = str(OutOfPages(needed, free))
            return Refused(reason=RefusalReason.PAGES, message=message, needed=needed, free=free)
        if isinstance(states := self._take_states(reservation, held), Refused):
            return states
        self.pool.incref((*shared, *source))  # first, since `allocate` may evict them
        taken = self.pool.allocate(needed)
        coming = () if self.host is None else self.host.coming_to(shared)
        if self.host is not None and held.slots:
            coming += (self.host.bring_back(held.slots, taken[: len(held.slots)]),)
        return RequestPages(
            pool=self.pool,
            coming=coming,
            host_tokens=len(held.slots) * PAGE_TOKENS,
            table=shared + taken[:fresh],
            held_tokens=held.tokens,
            key=reservation.key,
            exact=_stays_exact(reservation, held),
            spare=taken[fresh : fresh + spare],
            own=taken[fresh + spare :],
            session_token_ids=held.token_ids,
            copy_in=(source[0], taken[0]) if source else None,
            states=states,
        )

    def _take_states(self, reservation: Reservation, held: _Held) -> RequestStates | Refused | None:
        if self.states is None:
            return None
        kept = reservation.keep_tokens
        if kept and kept < held.tokens:
            message = f"the cached prefix of {held.tokens} tokens has no state after {kept} tokens"
            return Refused(reason=RefusalReason.NO_PREFIX, message=message)
        try:
            return RequestStates(self.states, held.state, held.tokens, kept)
        except OutOfSlots as error:
            needed = pages_for(held.tokens + reservation.new_tokens)
            return Refused(reason=RefusalReason.PAGES, message=str(error), needed=needed, free=self.pool.free)

    def prepare_session(self, pages: RequestPages, tokens: int) -> None:
        """If the session's last page is partly filled, allocate a spare page for its copy and set `copy_out`.

        A later `keep_session` then cannot fail.

        Raises:
            OutOfPages, OutOfSlots: No spare page or state slot was reserved, and none is free.
        """
        if pages.states is not None and tokens:
            pages.states.keep(tokens)
        full, rest = divmod(tokens, PAGE_TOKENS)
        if rest:
            pages.spare = pages.spare or self.pool.allocate(1)
            pages.copy_out = (pages.original_table[full], pages.spare[0])

    def keep_session(
        self,
        pages: RequestPages,
        tokens: int,
        owner: str,
        ttl_s: float,
        now: float,
        *,
        token_ids: bytes = b"",
    ) -> Lease:
        """Keep a request's first `tokens` tokens as a session, which shares the full pages.

        If the request continues, call `prepare_session` first: the session then gets the copy of the partly
        filled page. If the request ends here, the session shares that page itself.
        """
        copied = () if pages.copy_out is None else pages.copy_out[1:]
        shared = pages.original_table[: tokens // PAGE_TOKENS if copied else pages_for(tokens)]
        states = pages.states
        state = None if states is None else states.live if states.kept is None else states.kept
        lease = self.leases.adopt(
            owner, shared + copied, tokens, ttl_s, now, token_ids=token_ids, state=state
        )
        self.pool.incref(shared)
        if copied:
            pages.spare, pages.copy_out = (), None
        return lease


def _stays_exact(reservation: Reservation, held: _Held) -> bool:
    """Return whether all of a request's KV is prefilled densely. A decode worker always prefills densely."""
    read_exactly = reservation.reads or reservation.key is None or reservation.key.exact
    return held.exact and read_exactly


def _check_counts(reservation: Reservation) -> None:
    held = reservation.session_id is not None or reservation.prefix_tokens > 0
    if reservation.resume_tokens < 0 or (reservation.resume_tokens and reservation.reads):
        raise ValueError(f"cannot reserve for {reservation.resume_tokens} resumed tokens after the prompt")
    if reservation.prefix_tokens % PAGE_TOKENS or (reservation.prefix_tokens and reservation.session_id):
        raise ValueError(f"cannot start with {reservation.prefix_tokens} cached tokens")
    if reservation.reads and not held and reservation.options.prompt_logprobs is None:
        raise ValueError("a decode worker prefills only after a session or a prefix")
    prompt = reservation.new_tokens
    if prompt < 0 or reservation.max_tokens < 0 or (prompt == 0 and not held):
        raise ValueError(f"cannot reserve for {prompt} prompt tokens and {reservation.max_tokens} new tokens")
    most = reservation.prefix_tokens + prompt
    if reservation.keep_tokens < 0 or (reservation.session_id is None and reservation.keep_tokens > most):
        raise ValueError(f"keep_tokens {reservation.keep_tokens} must be within the prompt of {most} tokens")
