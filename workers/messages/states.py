"""The names and the states of workers, as doors find and read them."""

from __future__ import annotations

from dataclasses import dataclass

from .methods import PAGE_TOKENS

RATE_LASTS_S = 60.0
"""How long a group's rate stands for the next prompt's when nothing is read."""


@dataclass(frozen=True)
class GroupStats:
    """A prefill group as admission sees it. tokens_per_second: recent prefill rate (0: none seen yet).
    waiting_tokens: prompt tokens admitted and not yet computed. nodes: where its stages are (empty:
    unknown). draining: it ends what it has and wants nothing new, as long as there is anybody else.
    compilations: forms of kernels that its stages have made, by phase (`warm_up`, `serving`). pairing:
    `settings.pairing` of its configuration (empty: it goes with all). max_waiting: how
    many may wait (None: unknown). idle_s: seconds since it read anything, 0 while it does."""

    name: str
    pages_total: int
    pages_free: int
    running: int
    waiting: int
    waiting_tokens: int
    tokens_per_second: float
    nodes: tuple[str, ...] = ()
    draining: bool = False
    compilations: tuple[tuple[str, int], ...] = ()
    pairing: str = ""
    max_waiting: int | None = None
    idle_s: float = 0.0

    @property
    def full(self) -> bool:
        """Whether its queue was, as far as is known."""
        return self.max_waiting is not None and self.waiting >= self.max_waiting

    @property
    def rate(self) -> float:
        """tokens_per_second where it is recent enough to refuse by, else 0: only reading corrects a rate, and
        what a prompt took whose kernels were compiled meanwhile must not keep all others out."""
        return self.tokens_per_second if self.idle_s < RATE_LASTS_S else 0.0


@dataclass(frozen=True)
class OwnerUse:
    """What an owner's requests through one door hold on a decode worker, in tokens of K/V; or, with no door,
    what the owner's sessions hold."""

    owner: str
    door: str
    requests: int
    tokens: int


@dataclass(frozen=True)
class DecodeStats:
    """A decode worker as admission sees it. decoding: requests that run, or lack nothing but a place in the
    batch, where `waiting` also counts those whose prompt is being read. uses: by owner and door. node: where
    it is (empty: unknown). draining: it ends what it has, sessions included, and wants no new prompts, as
    long as there is anybody else. compilations, pairing: as a group's."""

    name: str
    pages_total: int
    pages_free: int
    running: int
    waiting: int
    sessions: int
    page_tokens: int = PAGE_TOKENS
    uses: tuple[OwnerUse, ...] = ()
    node: str = ""
    draining: bool = False
    compilations: tuple[tuple[str, int], ...] = ()
    pairing: str = ""
    decoding: int = 0


NAMESPACE = "deltafront"
"""Ray namespace of the actors below; sessions name their decode worker, so any door can find it."""


PREFILL_PREFIX = "prefill:"


DECODE_PREFIX = "decode:"
