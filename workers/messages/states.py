"""Workers' names and states, as doors find and read them."""

from dataclasses import dataclass

from .methods import PAGE_TOKENS

RATE_LASTS_S = 60.0
"""A group's rate counts for so long when nothing is read."""


@dataclass(frozen=True, kw_only=True)
class WorkerStats:
    """A worker as admission sees it.

    draining: wants nothing new if others exist. compilations: kernels that it has compiled, by phase
    (`warm_up`, `serving`). pairing: `settings.pairing` of its configuration; empty: it goes with all.
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
    """tokens_per_second: recent prefill rate; 0: unknown. waiting_tokens: admitted and not computed. nodes,
    compilations: of all stages. max_waiting: None: unknown. idle_s: since it last read.
    fetched_tokens_per_second: of K/V that decode workers gave back, lately; 0: unknown.
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
        """tokens_per_second while it is recent enough to refuse by, else 0. Only reading corrects a rate, and
        one that includes compilations must not keep all prompts out."""
        return self.tokens_per_second if self.idle_s < RATE_LASTS_S else 0.0


@dataclass(frozen=True, kw_only=True)
class OwnerUse:
    """An owner's use of a decode worker through one door, in tokens of K/V. No door: in sessions."""

    owner: str
    door: str
    requests: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TierStats:
    """A tier below the GPU: `host` memory or `disk`. Counts are of pages. room: the most that it holds.
    pages: those in it now. evicted, evicted_age_s: given up for others so far, and the seconds since their
    last uses, added up. evicted_retained: how many of them were still to be retained. missed: gone before
    they were copied there, or not readable. back, back_s: brought back to the GPU, and the seconds that it
    took."""

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
    """pages_free: also those that are only remembered. waiting: also requests whose prompt is being read.
    decoding: requests that run or lack only a place in the batch. draining: its sessions are still served.
    append_tokens_per_second: how fast it reads long appended text, lately; 0: unknown.
    page_bytes: of a page on all ranks. pages_remembered: entries, held or not. pages_evicted, evicted_age_s:
    entries given up for their pages so far, and the seconds since their last uses, added up.
    pages_evicted_retained: how many of them were still to be retained.
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
"""Ray's namespace of the actors."""
PREFILL_PREFIX = "prefill:"
DECODE_PREFIX = "decode:"
