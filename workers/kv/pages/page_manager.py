"""Reserves pages for requests. A request gets all pages that it can ever need at once.

It shares the full pages of a session or cached prefix and never writes to them. A session's partly filled
last page is copied. Recomputed blocks get unshared pages. Only the event loop's thread uses this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deltafront.workers.kv.pages.host_tier import HostTier
from deltafront.workers.kv.pages.leases import Lease, Leases
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, OutOfPages, PagePool, pages_for
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.kv.pages.state_slots import OutOfSlots, RequestStates, StateSlots
from deltafront.workers.messages.prompts import LINK_BYTES, PromptKey
from deltafront.workers.messages.requests import RefusalReason, Refused, Reservation, recompute_pages


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
