"""Workers' names and states, which doors read."""

from dataclasses import dataclass

from deltafront.kernels.constants import PAGE_TOKENS

RATE_LASTS_S = 60.0
"""How long a group's rate stays valid while it is idle."""


@dataclass(frozen=True, kw_only=True)
class WorkerStats:
    """A worker's state, from which doors decide about admission.

    Attributes:
        draining: The worker gets new requests only if there is no other.
        compilations: Number of compiled kernels, by phase (`warm_up`, `serving`).
        pairing: `settings.pairing` of its configuration; empty: fits any.
    """

    name: str
    pages_total: int
    pages_free: int
    running: int
    waiting: int
    draining: bool = False
    compilations: tuple[tuple[str, int], ...] = ()
    pairing: str = ""


@dataclass(frozen=True, kw_only=True)
class GroupStats(WorkerStats):
    """A prefill group.

    Attributes:
        waiting_tokens: Admitted tokens that are not prefilled yet.
        tokens_per_second: The recent rate of prefill; 0: unknown.
        nodes, compilations: Over all stages.
        max_waiting: The most requests that may wait; None: unknown.
        idle_s: Seconds since its last prefill.
        fetched_tokens_per_second: The recent rate of KV fetched back from decode workers; 0: unknown.
    """

    waiting_tokens: int
    tokens_per_second: float
    nodes: tuple[str, ...] = ()
    max_waiting: int | None = None
    idle_s: float = 0.0
    fetched_tokens_per_second: float = 0.0

    @property
    def full(self) -> bool:
        return self.max_waiting is not None and self.waiting >= self.max_waiting

    @property
    def rate(self) -> float:
        """tokens_per_second if it is recent enough to refuse requests by, otherwise 0.

        Only further prefill corrects a rate, so a slow rate with compilations must not refuse all prompts.
        """
        return self.tokens_per_second if self.idle_s < RATE_LASTS_S else 0.0


@dataclass(frozen=True, kw_only=True)
class OwnerUse:
    """An owner's requests at a decode worker through one door, and the tokens of their KV cache. An empty
    door name counts sessions.
    """

    owner: str
    door: str
    requests: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TierStats:
    """The state of a cache tier below the GPU: `host` memory or `disk`. Counts are pages.

    Attributes:
        room: Capacity in pages.
        pages: Pages in it now.
        evicted: Pages evicted so far.
        evicted_retained: How many of these were still retained.
        evicted_age_s: The sum, over evicted pages, of the seconds since their last use.
        missed: Pages that were evicted before they were copied to this tier, or could not be read.
        back, back_s: Pages copied back, and the seconds it took.
    """

    tier: str
    room: int
    pages: int
    bytes_per_page: int
    evicted: int
    evicted_retained: int
    evicted_age_s: float
    missed: int
    back: int
    back_s: float


@dataclass(frozen=True, kw_only=True)
class DecodeStats(WorkerStats):
    """A decode worker.

    Attributes:
        pages_free: Free pages, evictable ones of the prefix cache included.
        waiting: Waiting requests, including those in prefill.
        decoding: Requests that decode, or wait only for a place in the batch.
        draining: The worker drains; its sessions are still served.
        append_tokens_per_second: The recent prefill rate of long appended text; 0: unknown.
        page_bytes: Bytes of a page on all ranks.
        pages_remembered: Pages of the prefix cache, in use or not.
        pages_evicted, pages_evicted_retained, evicted_age_s: As in `TierStats`, of the pages.
    """

    sessions: int
    append_tokens_per_second: float = 0.0
    pages_remembered: int = 0
    pages_evicted: int = 0
    pages_evicted_retained: int = 0
    page_bytes: int = 0
    evicted_age_s: float = 0.0
    tiers: tuple[TierStats, ...] = ()
    page_tokens: int = PAGE_TOKENS
    uses: tuple[OwnerUse, ...] = ()
    node: str = ""
    decoding: int = 0


NAMESPACE = "deltafront"
"""The actors' namespace in Ray."""
PREFILL_PREFIX = "prefill:"
DECODE_PREFIX = "decode:"
