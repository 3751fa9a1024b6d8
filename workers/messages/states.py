"""Workers' names and states, as doors find and read them."""

from __future__ import annotations

from dataclasses import dataclass

from .methods import PAGE_TOKENS

RATE_LASTS_S = 60.0
"""A group's rate counts for so long when nothing is read."""


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """A prefill group as admission sees it.

    tokens_per_second: recent prefill rate; 0: unknown. waiting_tokens: admitted and not computed. nodes: of
    its stages. draining: wants nothing new if others exist. compilations: kernels that its stages have
    compiled, by phase (`warm_up`, `serving`). pairing: `settings.pairing` of its configuration; empty: it
    goes with all. max_waiting: None: unknown. idle_s: since it last read.
    """

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
class DecodeStats:
    """A decode worker as admission sees it.

    waiting: also requests whose prompt is being read. decoding: requests that run or lack only a place in
    the batch. draining: as a group's, its sessions still served. compilations, pairing: as a group's.
    """

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
"""Ray's namespace of the actors."""


PREFILL_PREFIX = "prefill:"


DECODE_PREFIX = "decode:"
