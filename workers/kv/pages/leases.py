"""A decode worker's sessions: leases that keep pages for an owner until they expire.

A lease holds one reference to each of its pages and never writes to them. When it ends, its full pages stay
in the prefix cache. Only the event loop's thread uses this module. Times are seconds since the epoch.
"""

import secrets
from dataclasses import dataclass, field

from deltafront.workers.kv.pages.pool import PagePool, pages_for
from deltafront.workers.kv.pages.state_slots import StateSlots
from deltafront.workers.messages.events import Session
from deltafront.workers.messages.requests import ID_BYTES


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A session and its pages, which are kept until `expires`.

    Attributes:
        token_ids: Little-endian uint32; empty if no block can be recomputed.
        state: The slot of the state after its tokens; None if the model's layers have none.
    """

    session_id: str
    owner: str
    pages: tuple[int, ...]
    tokens: int
    expires: float
    token_ids: bytes = field(repr=False, default=b"")
    state: int | None = None

    @property
    def message(self) -> Session:
        return Session(session_id=self.session_id, expires=self.expires, tokens=self.tokens)


class Leases:
    """A worker's sessions. An id is `<worker>.<random>`, so that any API server can find the worker."""

    def __init__(
        self, worker: str, pool: PagePool, max_ttl_s: float, states: StateSlots | None = None
    ) -> None:
        if max_ttl_s <= 0:
            raise ValueError(f"max_session_ttl_s must be positive, got {max_ttl_s}")
        self._worker = worker
        self._pool = pool
        self._max_ttl_s = max_ttl_s
        self._states = states
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def adopt(
        self,
        owner: str,
        pages: tuple[int, ...],
        tokens: int,
        ttl_s: float,
        now: float,
        *,
        token_ids: bytes = b"",
        state: int | None = None,
    ) -> Lease:
        """Make a session that takes over the caller's references to exactly `pages_for(tokens)` pages, and
        adds one to `state`.

        Args:
            ttl_s: Seconds until it expires, limited to the configured maximum; 0 or less: the maximum.
            token_ids: Token ids, little-endian uint32. Those after `tokens` are ignored.
        """
        if tokens < 1 or len(pages) != pages_for(tokens):
            raise ValueError(f"{tokens} tokens do not fill {len(pages)} pages")
        granted_s = min(ttl_s, self._max_ttl_s) if ttl_s > 0 else self._max_ttl_s
        lease = Lease(
            session_id=f"{self._worker}.{secrets.token_urlsafe(16)}",
            owner=owner,
            pages=pages,
            tokens=tokens,
            expires=now + granted_s,
            token_ids=token_ids[: tokens * ID_BYTES],
            state=state,
        )
        if self._states is not None and state is not None:
            self._states.incref(state)
        self._leases[lease.session_id] = lease
        return lease

    def find(self, session_id: str, owner: str, now: float) -> Lease | None:
        """Return a session; None if it is unknown, has expired or belongs to another owner."""
        lease = self._leases.get(session_id)
        if lease is None or lease.owner != owner or lease.expires <= now:
            return None
        return lease

    def ends(self, now: float) -> list[tuple[float, tuple[int, ...]]]:
        """Return the seconds until each lease expires, with the lease's pages."""
        return [(lease.expires - now, lease.pages) for lease in self._leases.values()]

    def release(self, session_id: str, owner: str, now: float) -> bool:
        lease = self.find(session_id, owner, now)
        if lease is None:
            return False
        self._drop(lease)
        return True

    def expire(self, now: float) -> int:
        """Drop the expired leases, and return their number."""
        gone = [lease for lease in self._leases.values() if lease.expires <= now]
        for lease in gone:
            self._drop(lease)
        return len(gone)

    def tokens_by_lease(self) -> list[tuple[str, int]]:
        return [(lease.owner, lease.tokens) for lease in self._leases.values()]

    def clear(self) -> None:
        for lease in list(self._leases.values()):
            self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        del self._leases[lease.session_id]
        if self._states is not None and lease.state is not None:
            self._states.release([lease.state])
        self._pool.release(lease.pages)
