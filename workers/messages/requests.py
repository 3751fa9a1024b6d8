"""What a door asks of prefill groups and decode workers, and how they refuse or fail."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum

from .methods import BLOCK, PAGE_TOKENS, MethodSpec

ID_BYTES = 4
"""A packed token id is a little-endian uint32."""
if sys.byteorder != "little":
    raise ImportError("Deltafront packs numbers as this machine has them, so it needs a little-endian one")
TAIL_TOKENS = 128
"""Of a prompt that nothing is appended to, so many tokens count as its question, and up to a block more, so
that what stands before them is whole blocks."""


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 are off. Streams with one seed do not depend on what
    else is in the batch."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 256
    ignore_eos: bool = False


class PageSelection(StrEnum):
    """Which pages sparse decode layers attend to."""

    DEFAULT = ""
    """What the worker is configured with."""
    FULL = "full"
    DELTA = "delta"
    """Those that a Δ-layer scored best (DELTA, Algorithm 2)."""


@dataclass(frozen=True)
class Reservation:
    """Ask a decode worker for pages for prompt_tokens + max_tokens (max_tokens 0: prefill only).

    With session_id, only what exceeds the session's shared pages is taken; prompt_tokens then counts the
    appended tokens alone. owner: who may use the session (an opaque digest; empty without auth).
    keep_tokens, page_selection: as the GenerateJob will say, so that the page that a kept session needs for
    itself is taken now and a selection that is not available is refused before any prefill. wait: for pages,
    where there are too few, as long as the worker's configuration says and until the deadline at most.
    door: who asks.
    prefix_tokens: build on so many tokens of the session alone (whole pages); 0: on all of them.
    append_tokens: so many more come with the GenerateJob and follow a prompt whose K/V a prefill group sends.
    recompute_blocks: pages for so many blocks of BLOCK tokens besides, as the GenerateJob will say.
    """

    request_id: str
    owner: str
    prompt_tokens: int
    max_tokens: int
    session_id: str | None = None
    keep_tokens: int = 0
    page_selection: PageSelection = PageSelection.DEFAULT
    wait: bool = False
    deadline: float | None = None
    door: str = ""
    prefix_tokens: int = 0
    append_tokens: int = 0
    recompute_blocks: int = 0


def recompute_pages(blocks: int, tokens: int, *, appended: bool) -> int:
    """Pages that a request takes to compute so many blocks of the first `tokens` tokens again: since others
    may share what is there, they are written elsewhere, and so is the tail of a prompt without anything
    appended, which is read again."""
    most = min(blocks, max(0, tokens // BLOCK - 1))
    tail = 0 if appended else TAIL_TOKENS + BLOCK
    return (most * BLOCK + tail) // PAGE_TOKENS if most else 0


class RefusalReason(StrEnum):
    PAGES = "pages"
    """The pool has not enough free pages now."""
    BUSY = "busy"
    """As many requests wait here as may."""
    TOO_LARGE = "too_large"
    """The pool could never hold it."""
    NO_SESSION = "no_session"
    """Unknown, expired, or somebody else's."""
    POSITIONS = "positions"
    """Session and appended tokens exceed the model's positions."""
    SELECTION = "selection"
    """The page selection asked for is not available."""
    DEADLINE = "deadline"
    DUPLICATE = "duplicate"
    """A request of this id is already here."""


@dataclass(frozen=True)
class Refused:
    """A worker's no; nothing was taken. needed, free: pages. tokens_left: of the model's positions, for an
    answer. retry_after_s: when it may be a yes; None: never, or unknown."""

    reason: RefusalReason
    message: str
    needed: int = 0
    free: int = 0
    retry_after_s: float | None = None
    tokens_left: int = 0


@dataclass(frozen=True)
class Reserved:
    """A worker's yes. session_tokens: length of the session's prefix that the request builds on."""

    pages: int
    session_tokens: int = 0


@dataclass(frozen=True)
class PrefillJob:
    """What a prefill group needs. token_ids: little-endian uint32. decode_worker: the actor name that
    reserved pages for request_id; K/V is announced to it. start: so many tokens are to be brought from
    there instead of computed, a multiple of BLOCK; another group has. attempt: how often the prompt has
    been begun before; messages of an earlier attempt are not taken. trace: the W3C `traceparent` that spans
    of the work belong under; empty if nobody records it, in every message that has one."""

    request_id: str
    token_ids: bytes
    method: MethodSpec
    decode_worker: str
    deadline: float | None = None
    wants_logits: bool = True
    start: int = 0
    attempt: int = 0
    trace: str = ""

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // 4


@dataclass(frozen=True)
class GenerateJob:
    """Decode from a request's prefilled K/V (session_id None) or from a session, plus appended tokens.

    keep_tokens: if positive, the first
    keep_tokens of prompt K/V become a session of ttl seconds when the first token is out, found by `chain`.
    recompute_blocks: of what was read with a method that is not exact, how many blocks are computed again
    before the first token: those that the question looks at most. prompt_ids: all of such a prompt, without
    which nothing of it or of a session made of it can be; empty for a prompt that was read exactly.
    answered_tokens: the last so many of append_ids are of the answer.
    """

    request_id: str
    sampling: Sampling
    append_ids: bytes = b""
    session_id: str | None = None
    page_selection: PageSelection = PageSelection.DEFAULT
    keep_tokens: int = 0
    keep_ttl_s: float = 0.0
    deadline: float | None = None
    chain: bytes = field(repr=False, default=b"")
    trace: str = ""
    recompute_blocks: int = 0
    prompt_ids: bytes = field(repr=False, default=b"")
    answered_tokens: int = 0


@dataclass(frozen=True)
class KeepSession:
    """Turn a finished prefill into a session, found by `chain`; waits until the last page has been pulled.
    prompt_ids: as in `GenerateJob`."""

    request_id: str
    ttl_s: float
    deadline: float | None = None
    chain: bytes = field(repr=False, default=b"")
    trace: str = ""
    prompt_ids: bytes = field(repr=False, default=b"")


class PrefillFailed(Exception):
    """A prefill ended without a result: str() is one plain line. The group may or may not live on."""


class PrefillCancelled(PrefillFailed):
    """It was cancelled by id."""


class DecodeFailed(Exception):
    """A prompt's K/V could not be received, so there is nothing to keep: str() is one plain line."""
