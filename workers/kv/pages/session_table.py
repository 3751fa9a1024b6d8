"""Sessions of a decode worker: K/V that is kept for an owner until its lease runs out.

A session holds one reference on each of its pages and never writes to them. Pure accounting on the event
loop's thread; times are seconds since the epoch.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from ...messages.events import LINK_BYTES, Prefix, Session
from ...messages.requests import ID_BYTES
from .pool import PAGE_TOKENS, PagePool, pages_for


@dataclass(frozen=True, kw_only=True)
class KeptSession:
    """ids: little-endian uint32, where blocks may be computed again; else empty."""

    session_id: str
    owner: str
    pages: tuple[int, ...]
    tokens: int
    expires: float
    chain: bytes = b""
    ids: bytes = field(repr=False, default=b"")

    @property
    def message(self) -> Session:
        return Session(session_id=self.session_id, expires=self.expires, tokens=self.tokens)


class SessionTable:
    """Sessions by id. An id is `<worker>.<random>`, so that any door finds the worker."""

    def __init__(self, worker: str, pool: PagePool, max_ttl_s: float) -> None:
        if max_ttl_s <= 0:
            raise ValueError(f"max_session_ttl_s must be positive, got {max_ttl_s}")
        self._worker = worker
        self._pool = pool
        self._max_ttl_s = max_ttl_s
        self._sessions: dict[str, KeptSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def adopt(
        self,
        owner: str,
        pages: tuple[int, ...],
        tokens: int,
        ttl_s: float,
        now: float,
        *,
        chain: bytes = b"",
        ids: bytes = b"",
    ) -> KeptSession:
        """Make a session of exactly pages_for(tokens) pages, whose references it takes over.

        Args:
            ttl_s: at most the configured maximum; 0 or less asks for the maximum.
            chain: links of its full pages; empty where no prompt may find it.
            ids: of these tokens, and any behind them.
        """
        if tokens < 1 or len(pages) != pages_for(tokens):
            raise ValueError(f"{tokens} tokens do not fill {len(pages)} pages")
        lease = min(ttl_s, self._max_ttl_s) if ttl_s > 0 else self._max_ttl_s
        links = tokens // PAGE_TOKENS * LINK_BYTES
        session = KeptSession(
            session_id=f"{self._worker}.{secrets.token_urlsafe(16)}",
            owner=owner,
            pages=pages,
            tokens=tokens,
            expires=now + lease,
            chain=chain[:links],
            ids=ids[: tokens * ID_BYTES],
        )
        self._sessions[session.session_id] = session
        return session

    def find(self, session_id: str, owner: str, now: float) -> KeptSession | None:
        """None: unknown, expired or somebody else's."""
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner or session.expires <= now:
            return None
        return session

    def leases(self, now: float) -> list[tuple[float, tuple[int, ...]]]:
        return [(session.expires - now, session.pages) for session in self._sessions.values()]

    def longest_prefix(self, owner: str, chain: bytes, now: float) -> Prefix | None:
        best = None
        for session in self._sessions.values():
            if session.owner == owner and session.expires > now:
                tokens = PAGE_TOKENS * shared_links(session.chain, chain)
                if tokens > (best.tokens if best else 0):
                    best = Prefix(session_id=session.session_id, tokens=tokens)
        return best

    def release(self, session_id: str, owner: str, now: float) -> bool:
        session = self.find(session_id, owner, now)
        if session is None:
            return False
        self._drop(session)
        return True

    def expire(self, now: float) -> int:
        """Return how many sessions were dropped."""
        gone = [session for session in self._sessions.values() if session.expires <= now]
        for session in gone:
            self._drop(session)
        return len(gone)

    def tokens_by_session(self) -> list[tuple[str, int]]:
        return [(session.owner, session.tokens) for session in self._sessions.values()]

    def clear(self) -> None:
        for session in list(self._sessions.values()):
            self._drop(session)

    def _drop(self, session: KeptSession) -> None:
        del self._sessions[session.session_id]
        self._pool.release(session.pages)


def shared_links(chain: bytes, other: bytes) -> int:
    """Count the links that two chains share from their beginning. All links before an equal one are equal, so
    halving finds the end."""
    low, high = 0, min(len(chain), len(other)) // LINK_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        link = slice((middle - 1) * LINK_BYTES, middle * LINK_BYTES)
        low, high = (middle, high) if chain[link] == other[link] else (low, middle - 1)
    return low
