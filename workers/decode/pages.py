"""Which pages of a decode worker belong to which request and session: reservation, sharing, keeping.

Used from one thread (the event loop's). Tensors are touched only through `copy_page`, given by the caller.
A request holds one reference on every page of its table; pages that it shares with a session are full, so
it never writes to them, and the session's last, partly filled page is copied for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..kv.page_pool import OutOfPages, PagePool, pages_for
from ..messages import RefusalReason, Refused, Reserve
from .sessions import KeptSession, SessionsTable


@dataclass
class Holding:
    """A request's pages: its table in order, and the spare for a kept session's partly filled last page.

    session_tokens: tokens of K/V that were there from the start.
    """

    table: tuple[int, ...]
    session_tokens: int
    spare: tuple[int, ...] = ()

    @property
    def all_pages(self) -> tuple[int, ...]:
        return self.table + self.spare


class DecodePages:
    """The pool and the sessions of one worker; `positions` is the model's limit in tokens."""

    def __init__(
        self,
        pool: PagePool,
        sessions: SessionsTable,
        positions: int,
        copy_page: Callable[[int, int], None],
    ) -> None:
        self.pool = pool
        self.sessions = sessions
        self._positions = positions
        self._copy_page = copy_page

    def reserve(self, order: Reserve, now: float) -> Holding | Refused:
        """Take everything that `order` will ever need, or nothing."""
        self.sessions.expire(now)
        session = None
        if order.session_id is not None:
            session = self.sessions.find(order.session_id, order.owner, now)
            if session is None:
                message = f"session {order.session_id} does not exist or has expired"
                return Refused(RefusalReason.NO_SESSION, message)
        before = 0 if session is None else session.tokens
        total = before + order.prompt_tokens + order.max_tokens
        if total > self._positions:
            return Refused(
                RefusalReason.POSITIONS,
                f"{before} session tokens, {order.prompt_tokens} prompt tokens and {order.max_tokens} new "
                f"tokens exceed the model's {self._positions} positions",
            )
        return self._take(order, session, total)

    def _take(self, order: Reserve, session: KeptSession | None, total: int) -> Holding | Refused:
        size = self.pool.page_tokens
        before = 0 if session is None else session.tokens
        shared = () if session is None else session.pages[: before // size]
        spare = 1 if order.keep_tokens % size else 0
        fresh = pages_for(total, size) - len(shared)
        # A session's own partly filled page stays occupied beside the copy of it.
        least = pages_for(total, size) + spare + (1 if before % size else 0)
        if least > self.pool.total:
            message = f"{least} KV pages are needed, this worker has {self.pool.total} in all"
            return Refused(RefusalReason.TOO_LARGE, message, least, self.pool.free)
        try:
            taken = self.pool.allocate(fresh + spare)
        except OutOfPages as error:
            return Refused(RefusalReason.PAGES, str(error), error.needed, error.free)
        self.pool.share(shared)
        if session is not None and before % size:
            self._copy_page(session.pages[-1], taken[0])
        return Holding(shared + taken[:fresh], before, taken[fresh:])

    def ensure_spare(self, holding: Holding, keep_tokens: int) -> None:
        """Make sure that `keep` of keep_tokens cannot fail. Raises OutOfPages where no room was reserved."""
        if keep_tokens % self.pool.page_tokens and not holding.spare:
            holding.spare = self.pool.allocate(1)

    def keep(self, holding: Holding, tokens: int, owner: str, ttl_s: float, now: float) -> KeptSession:
        """A session of the first `tokens` tokens of a request that goes on: full pages are shared."""
        full = tokens // self.pool.page_tokens
        pages = holding.table[:full]
        if tokens % self.pool.page_tokens:
            self._copy_page(holding.table[full], holding.spare[0])
            pages, holding.spare = pages + holding.spare[:1], holding.spare[1:]
        self.pool.share(holding.table[:full])
        return self.sessions.adopt(owner, pages, tokens, ttl_s, now)

    def hand_over(self, holding: Holding, tokens: int, owner: str, ttl_s: float, now: float) -> KeptSession:
        """A session of the first `tokens` tokens of a request that ends here; `release` it next."""
        pages = holding.table[: pages_for(tokens, self.pool.page_tokens)]
        self.pool.share(pages)
        return self.sessions.adopt(owner, pages, tokens, ttl_s, now)

    def release(self, holding: Holding) -> None:
        self.pool.release(holding.all_pages)
        holding.table, holding.spare = (), ()
