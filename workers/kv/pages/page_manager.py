"""Reserves pages for requests. A request gets all pages that it can ever need at once.

It shares the full pages of a session or cached prefix and never writes to them. A session's partly filled
last page is copied. Recomputed blocks get unshared pages. Only the event loop's thread uses this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deltafront.kernels.constants import BLOCK
from deltafront.workers.kv.pages.host_states import StateBack
from deltafront.workers.kv.pages.host_tier import HostTier, PagesBack
from deltafront.workers.kv.pages.leases import Lease, Leases
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, OutOfPages, PagePool, pages_for
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.kv.pages.state_slots import OutOfSlots, RequestStates, StateSlots
from deltafront.workers.messages.events import Prefix
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
        state_below: The name of that state and its slot in host memory, if it is only there.
    """

    tokens: int = 0
    pages: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    partly_filled: int | None = None
    token_ids: bytes = b""
    exact: bool = True
    may_recompute: bool = True
    state: int | None = None
    state_below: tuple[bytes, int] | None = None


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

    def prefix(self, key: PromptKey) -> Prefix | None:
        """Return the prefix hit that `find` finds; None if there is none."""
        pages, slots, exact = self.find(key)
        tokens = (len(pages) + len(slots)) * PAGE_TOKENS
        if not tokens or self.states is None:
            return Prefix(tokens=tokens, exact=exact) if tokens else None
        group_tokens = self._last_state(pages, slots, BLOCK // PAGE_TOKENS) * PAGE_TOKENS
        return Prefix(tokens=tokens, exact=exact, has_state=True, group_tokens=group_tokens)

    def find(self, key: PromptKey) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Find a prompt's longest cached prefix. If the model's layers have states, it ends where
        one is cached, before the prompt's last token.

        Returns:
            Its pages on the GPU, the slots of host memory with the KV after them, and whether all of it was
                prefilled densely.
        """
        slots: tuple[int, ...] = ()
        pages, exact = self.pool.prefix_cache.find(key)
        if self.host is not None:
            slots, also_exact = self.host.find(key, len(pages))
            exact = exact and also_exact
        if self.states is None:
            return pages, slots, exact
        last = len(key.chain) // LINK_BYTES - (not key.tail)
        last = self._last_state(pages[:last], slots[: max(0, last - len(pages))])
        return pages[:last], slots[: max(0, last - len(pages))], exact

    def _last_state(self, pages: Sequence[int], slots: Sequence[int], step: int = 1) -> int:
        """Return the largest number of these cached pages and slots, a multiple of `step`, after which a
        state is cached; 0: none."""
        assert self.states is not None
        counts = range((len(pages) + len(slots)) // step * step, 0, -step)
        return next((n for n in counts if self._name(pages, slots, n) in self.states), 0)

    def _name(self, pages: Sequence[int], slots: Sequence[int], count: int) -> bytes:
        """Return the name of the block that is number `count` (from 1) of these pages and slots."""
        if count <= len(pages):
            return self.pool.prefix_cache[pages[count - 1]].name
        assert self.host is not None
        return self.host.pool.prefix_cache[slots[count - 1 - len(pages)]].name

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
        held = _Held(tokens=reservation.prefix_tokens, pages=pages, slots=slots, exact=exact)
        return held if self.states is None else self._find_state(held, self.states)

    def _find_state(self, held: _Held, states: StateSlots) -> _Held | Refused:
        """Add the state after the held tokens, or refuse the reservation if it is no longer cached."""
        name = self._name(held.pages, held.slots, held.tokens // PAGE_TOKENS)
        if (state := states.find(name)) is not None:
            return replace(held, state=state)
        if states.below is not None and (state := states.below.find(name)) is not None:
            return replace(held, state_below=(name, state))
        message = f"the state after {held.tokens} tokens of the prompt is no longer cached"
        return Refused(reason=RefusalReason.NO_PREFIX, message=message)

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
        return RequestPages(
            pool=self.pool,
            coming=self._coming(held, taken, states),
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
        taken: tuple[int, ...] = ()
        try:
            if held.state_below is not None:
                taken = self.states.take(1)
            source = taken[0] if taken else held.state
            return RequestStates(self.states, source, held.tokens, kept)
        except OutOfSlots as error:
            needed = pages_for(held.tokens + reservation.new_tokens)
            return Refused(reason=RefusalReason.PAGES, message=str(error), needed=needed, free=self.pool.free)
        finally:
            self.states.release(taken)

    def _coming(
        self, held: _Held, taken: Sequence[int], states: RequestStates | None
    ) -> tuple[PagesBack, ...]:
        """Start the copy of what is held in host memory into the first `taken` pages. Return it, and running
        copies into shared pages and states."""
        if self.host is None:
            return ()
        source = None if states is None else states.source
        coming = self.host.coming_to(held.pages, source)
        state = None
        if held.state_below is not None:
            name, slot = held.state_below
            assert self.states is not None and source is not None
            self.states.cache(name, source)  # now, so that other requests find it and wait for the same copy
            state = StateBack(name, slot, source)
        if not held.slots and state is None:
            return coming
        return (*coming, self.host.bring_back(held.slots, taken[: len(held.slots)], state))

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
