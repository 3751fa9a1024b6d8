"""A request takes all pages that it will ever need at once.

A request shares only full pages and never writes to them. A session's partly filled last page is copied, and
recomputed blocks get pages of their own. Pure accounting on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...messages.requests import ID_BYTES, RefusalReason, Refused, Reservation, recompute_pages
from .pool import PAGE_TOKENS, OutOfPages, PagePool, pages_for
from .session_table import KeptSession, SessionTable

PageCopy = tuple[int, int]
"""Source and target."""


@dataclass(eq=False, kw_only=True)
class RequestPages:
    """A request's page table.

    session_tokens: tokens whose K/V is there from the start. session_ids: their little-endian uint32 ids,
    where needed. spare: a page for a kept session's partly filled last page. copy_in: the session's partly
    filled page and the table's, to copy first. copy_out: the table's page and the spare, to copy once the
    prompt is complete. own: pages for `divert`. on_free: called once, when all is given back.

    A step or a copy may still touch an ended request's pages. So such work runs inside `use`, and the last of
    `end` and all uses gives the pages back.
    """

    pool: PagePool
    table: tuple[int, ...]
    session_tokens: int
    spare: tuple[int, ...] = ()
    copy_in: PageCopy | None = None
    copy_out: PageCopy | None = None
    session_ids: bytes = field(repr=False, default=b"")
    own: tuple[int, ...] = ()
    on_free: Callable[[], None] = lambda: None
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    _aside: tuple[int, ...] = ()
    """Pages that `divert` has replaced in the table."""
    _ended: bool = False
    _users: int = 0
    _unused: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.original_table = self.table
        """Before `divert`; a session is made of it."""

    @property
    def count(self) -> int:
        return len(self.table) + len(self.spare) + len(self.own) + len(self._aside)

    @property
    def every_page(self) -> tuple[int, ...]:
        """Its pages, and the session's page that is still to be copied."""
        source = () if self.copy_in is None else self.copy_in[:1]
        return (*self.table, *self.spare, *self.own, *self._aside, *source)

    def divert(self, places: Sequence[int]) -> None:
        """Put own pages at these places. The replaced ones are not written to any more and are given back
        with the others. Raises ValueError if there are too few."""
        if len(places) > len(self.own):
            raise ValueError(f"{len(places)} places of the table, but {len(self.own)} pages of its own")
        table, used = list(self.table), self.own[: len(places)]
        for place, page in zip(places, used, strict=True):
            self._aside += (table[place],)
            table[place] = page
        self.table, self.own = tuple(table), self.own[len(places) :]

    @contextmanager
    def use(self) -> Iterator[tuple[int, ...] | None]:
        """Yield the table, whose pages nobody gives away meanwhile; None if the request has ended."""
        if self._ended:
            yield None
            return
        self._users += 1
        self._unused.clear()
        try:
            yield self.table
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()
            self._free_if_idle()

    async def unused(self) -> None:
        while self._users:
            await self._unused.wait()

    def end(self) -> None:
        self._ended = True
        self._free_if_idle()

    def _free_if_idle(self) -> None:
        if self._ended and self._users == 0 and not self.freed.is_set():
            self.pool.release(self.every_page)
            self.table, self.spare, self.own, self._aside = (), (), (), ()
            self.copy_in = self.copy_out = None
            self.freed.set()
            self.on_free()


class PageManager:
    """One worker's pool and sessions. positions: the model's limit in tokens."""

    def __init__(self, pool: PagePool, sessions: SessionTable, positions: int) -> None:
        self.pool = pool
        self.sessions = sessions
        self._positions = positions

    def reserve(self, reservation: Reservation, now: float, behind: int = 0) -> RequestPages | Refused:
        """Take all of a request's pages or none; none while others wait.

        Args:
            now: seconds since the epoch.
            behind: how many reservations wait already.
        Raises: ValueError for counts that make no sense.
        """
        _check_counts(reservation)
        self.sessions.expire(now)
        session = None
        if reservation.session_id is not None:
            session = self.sessions.find(reservation.session_id, reservation.owner, now)
            if session is None:
                message = f"session {reservation.session_id} does not exist or has expired"
                return Refused(reason=RefusalReason.NO_SESSION, message=message)
        before = self._before(reservation, session)
        total = before + reservation.prompt_tokens + reservation.append_tokens + reservation.max_tokens
        if total > self._positions:
            return Refused(
                reason=RefusalReason.POSITIONS,
                message=f"{before} session tokens, {reservation.prompt_tokens} prompt tokens and "
                f"{reservation.max_tokens} new tokens exceed the model's {self._positions} positions",
                tokens_left=max(0, self._positions - (total - reservation.max_tokens)),
            )
        return self._take(reservation, session, total, behind)

    def _before(self, reservation: Reservation, session: KeptSession | None) -> int:
        if session is None or not reservation.prefix_tokens:
            return 0 if session is None else session.tokens
        if reservation.prefix_tokens > session.tokens or reservation.prefix_tokens % PAGE_TOKENS:
            raise ValueError(
                f"a session of {session.tokens} tokens has no prefix of {reservation.prefix_tokens}"
            )
        return reservation.prefix_tokens

    def _take(
        self, reservation: Reservation, session: KeptSession | None, total: int, behind: int
    ) -> RequestPages | Refused:
        before = self._before(reservation, session)
        shared = () if session is None else session.pages[: before // PAGE_TOKENS]
        spare = 1 if reservation.keep_tokens % PAGE_TOKENS else 0
        fresh = pages_for(total) - len(shared)
        own = 0
        if session is None or session.ids:
            known_tokens, appended = before or reservation.prompt_tokens, session is not None
            own = recompute_pages(reservation.recompute_blocks, known_tokens, appended=appended)
        # A session's partly filled page stays occupied beside its copy.
        least = pages_for(total) + spare + own + (1 if before % PAGE_TOKENS else 0)
        if least > self.pool.total:
            message = f"{least} KV pages are needed, this worker has {self.pool.total} in all"
            return Refused(reason=RefusalReason.TOO_LARGE, message=message, needed=least, free=self.pool.free)
        if behind:
            message = f"{behind} reservations wait for KV pages already"
            return Refused(
                reason=RefusalReason.PAGES, message=message, needed=fresh + spare + own, free=self.pool.free
            )
        try:
            taken = self.pool.allocate(fresh + spare + own)
        except OutOfPages as error:
            return Refused(
                reason=RefusalReason.PAGES, message=str(error), needed=error.needed, free=error.free
            )
        self.pool.retain(shared)
        table, spares = shared + taken[:fresh], taken[fresh : fresh + spare]
        pages = RequestPages(
            pool=self.pool, table=table, session_tokens=before, spare=spares, own=taken[fresh + spare :]
        )
        if session is not None:
            pages.session_ids = session.ids[: before * ID_BYTES]
        if session is not None and before % PAGE_TOKENS:
            pages.copy_in = (session.pages[-1], taken[0])
            self.pool.retain(session.pages[-1:])
        return pages

    def prepare_session(self, pages: RequestPages, tokens: int) -> None:
        """Make sure that `keep_session` cannot fail for a request that goes on, and name the page to copy
        first. Raises OutOfPages where none was reserved."""
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
        chain: bytes = b"",
        ids: bytes = b"",
    ) -> KeptSession:
        """Make a session of a request's first `tokens` tokens.

        Full pages are shared. If the request goes on, `prepare_session` comes first, and the copy of the
        partly filled page changes hands. If it ends here, that page itself is shared.
        """
        copied = () if pages.copy_out is None else pages.copy_out[1:]
        shared = pages.original_table[: tokens // PAGE_TOKENS if copied else pages_for(tokens)]
        session = self.sessions.adopt(owner, shared + copied, tokens, ttl_s, now, chain=chain, ids=ids)
        self.pool.retain(shared)
        if copied:
            pages.spare, pages.copy_out = (), None
        return session


def _check_counts(reservation: Reservation) -> None:
    if reservation.append_tokens < 0 or (reservation.append_tokens and reservation.session_id is not None):
        raise ValueError(f"cannot reserve for {reservation.append_tokens} tokens behind the prompt")
    prompt = reservation.prompt_tokens
    if prompt < 0 or reservation.max_tokens < 0 or (prompt == 0 and reservation.session_id is None):
        raise ValueError(f"cannot reserve for {prompt} prompt tokens and {reservation.max_tokens} new tokens")
    if reservation.keep_tokens < 0 or (reservation.session_id is None and reservation.keep_tokens > prompt):
        raise ValueError(
            f"keep_tokens {reservation.keep_tokens} must be within the prompt of {prompt} tokens"
        )
