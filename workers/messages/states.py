"""Workers' names and statistics, which API servers read."""

from dataclasses import dataclass

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.workers.messages.service_tiers import ServiceTier

Queued = tuple[int, float, ServiceTier]
"""A prompt in a prefill group's queue: its tokens, the seconds they take, and its service tier."""

RATE_LASTS_S = 60.0
"""Seconds for which an idle prefill group's rate stays valid."""


@dataclass(frozen=True, kw_only=True)
class PrefillCost:
    """Coefficients of a prefill group's time: seconds per chunk, per token, and per causal pair of query and
    key.

    `chunk_tokens` is the length of the group's chunks; None: the group prefills a prompt in one chunk.
    """

    token_s: float
    pair_s: float = 0.0
    chunk_s: float = 0.0
    chunk_tokens: int | None = None

    def seconds(self, start: int, end: int) -> float:
        """Predict the seconds for tokens start .. end-1 of a prompt."""
        tokens = end - start
        chunks = 1 if self.chunk_tokens is None else -(-tokens // self.chunk_tokens)
        pairs = tokens * (start + end) / 2
        return self.chunk_s * chunks + self.token_s * tokens + self.pair_s * pairs

    def queued_seconds(self, start: int, end: int, batch_tokens: int) -> float:
        """Predict `seconds` of a prompt that waits. If it is short, other prompts share its batch of
        `batch_tokens`, and with it the seconds per chunk."""
        others = max(0.0, 1 - (end - start) / batch_tokens) if batch_tokens else 0.0
        return self.seconds(start, end) - self.chunk_s * others


@dataclass(frozen=True, kw_only=True)
class WorkerStats:
    """A worker's statistics, from which API servers decide about admission.

    Attributes:
        draining: The worker gets new requests only if there is no other worker.
        compilations: Number of compiled kernels, by phase (`warm_up`, `serving`).
        pairing: Prefill groups and decode workers with equal strings can serve a prompt together
            (`settings.pairing`); empty: compatible with any.
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
    """A prefill group's statistics.

    Attributes:
        waiting_tokens: Tokens of admitted prompts that are not prefilled yet.
        tokens_per_second: The recent rate of prefill; 0: unknown.
        nodes: The ids of the Ray nodes on which the group's stages run.
        compilations: As in `WorkerStats`, summed over stages.
        max_waiting: Maximum number of waiting requests; None: unknown.
        idle_s: Seconds since the group's last chunk; 0 while it prefills.
        fetched_tokens_per_second: The recent rate at which stages fetch KV from decode workers to resume
            prompts; 0: unknown.
        costs: The learned cost of each attention method.
        queue: For each admitted prompt of a method with a learned cost, the tokens still to send to the
            stages, the seconds they will take, and its service tier. A prompt's chunks in flight are a
            separate entry with 0 tokens.
    """

    waiting_tokens: int
    tokens_per_second: float
    nodes: tuple[str, ...] = ()
    max_waiting: int | None = None
    idle_s: float = 0.0
    fetched_tokens_per_second: float = 0.0
    costs: tuple[tuple[str, PrefillCost], ...] = ()
    queue: tuple[Queued, ...] = ()

    @property
    def full(self) -> bool:
        return self.max_waiting is not None and self.waiting >= self.max_waiting

    @property
    def recent(self) -> bool:
        """True if the group's rate and costs were measured recently, so that requests may be refused by them.

        Only further prefill updates the measurements. If old measurements, slow because kernels were
        compiled, led to the refusal of all prompts, no prefill would update them.
        """
        return self.idle_s < RATE_LASTS_S

    def cost(self, method: str) -> PrefillCost | None:
        """Return an attention method's learned cost. A new method's cost is estimated from
        `tokens_per_second`; None if that is unknown."""
        learned = dict(self.costs).get(method)
        if learned is None and self.tokens_per_second > 0:
            return PrefillCost(token_s=1 / self.tokens_per_second)
        return learned

    def alone_s(self, method: str, start: int, end: int) -> float | None:
        """Predict the seconds to prefill tokens start .. end-1 of a prompt; None without a recent cost."""
        cost = self.cost(method) if self.recent else None
        return None if cost is None else cost.seconds(start, end)

    def expected_s(self, method: str, start: int, end: int, tier: ServiceTier) -> float | None:
        """Predict the seconds until a prompt that arrives now is prefilled, after those that precede it; None
        without a recent cost."""
        alone = self.alone_s(method, start, end)
        return None if alone is None else self.wait_s(end - start, tier, alone) + alone

    def wait_s(self, tokens: int, tier: ServiceTier = ServiceTier.DEFAULT, alone_s: float = 0.0) -> float:
        """Predict the seconds that a prompt of this length waits until its prefill of `alone_s` seconds ends.

        Shorter prompts of the same service tier are prefilled first. Meanwhile each other tier gets its share
        by weight, as long as it has prompts.
        """
        if self.queue or not self.tokens_per_second:
            first = sum(s for left, s, of in self.queue if not left or (of is tier and left <= tokens))
            others = [[s for left, s, of in self.queue if left and of is other] for other in ServiceTier]
            shares = [(first + alone_s) * other.weight / tier.weight for other in ServiceTier]
            pairs = zip(ServiceTier, others, shares, strict=True)
            return first + sum(min(sum(queued), share) for other, queued, share in pairs if other is not tier)
        return self.waiting_tokens / self.tokens_per_second


@dataclass(frozen=True, kw_only=True)
class OwnerUse:
    """One caller's use of a decode worker through one API server: requests, and tokens of KV cache.

    An empty `door` stands for the caller's sessions.
    """

    owner: str
    door: str
    requests: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TierStats:
    """Statistics of a tier to which the prefix cache is offloaded: `host` memory or `disk`. Counts are pages.

    Attributes:
        room: Capacity.
        pages: Pages in the tier now.
        evicted: Pages evicted so far.
        evicted_retained: Evicted pages whose `retain_s` had not passed.
        evicted_age_s: The sum, over evicted pages, of the seconds since their last use.
        missed: Pages that were evicted before they could be copied to this tier, or could not be read.
        back, back_s: Pages copied back from this tier, and the seconds that this took.
        states_evicted: States evicted so far from host memory.
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
    states_evicted: int = 0


@dataclass(frozen=True, kw_only=True)
class DecodeStats(WorkerStats):
    """A decode worker's statistics.

    Attributes:
        pages_free: Free pages, including those of the prefix cache that can be evicted.
        waiting: Waiting requests, including those in prefill.
        decoding: Requests that decode, or wait only for a place in the batch.
        draining: The worker drains. It still serves its sessions.
        append_tokens_per_second: The recent rate at which the worker prefills long appended text; 0: unknown.
        page_bytes: Bytes of a page, summed over ranks.
        pages_remembered: Pages in the prefix cache, whether a request uses them or not.
        pages_evicted, pages_evicted_retained, evicted_age_s: As `evicted`, `evicted_retained` and
            `evicted_age_s` of `TierStats`, for the pages of the KV cache.
        state_slots, state_slots_free: Slots for states, and those that no request or session holds, cached
            states included. 0 if no layer of the model has a state.
        states_evicted: States evicted from the prefix cache so far.
    """

    sessions: int
    append_tokens_per_second: float = 0.0
    pages_remembered: int = 0
    pages_evicted: int = 0
    pages_evicted_retained: int = 0
    page_bytes: int = 0
    evicted_age_s: float = 0.0
    state_slots: int = 0
    state_slots_free: int = 0
    states_evicted: int = 0
    tiers: tuple[TierStats, ...] = ()
    page_tokens: int = PAGE_TOKENS
    uses: tuple[OwnerUse, ...] = ()
    node: str = ""
    decoding: int = 0


NAMESPACE = "deltafront"
"""The Ray namespace of the actors."""
PREFILL_PREFIX = "prefill:"
DECODE_PREFIX = "decode:"
