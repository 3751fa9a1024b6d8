"""A door's requests to prefill groups and decode workers, and how these refuse or fail."""

import sys
from dataclasses import dataclass, field
from enum import StrEnum

from .methods import BLOCK, PAGE_TOKENS, MethodSpec
from .prompts import PromptKey

ID_BYTES = 4
"""A packed token id is a little-endian uint32."""
if sys.byteorder != "little":
    raise ImportError("Deltafront packs numbers as this machine has them, so it needs a little-endian one")
TAIL_TOKENS = 128
"""Without appended text, so many last tokens count as the question, and up to a block more, so that whole
blocks precede it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 are off. A seed's stream does not depend on the batch."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 256
    ignore_eos: bool = False


class PageSelection(StrEnum):
    DEFAULT = ""
    """The worker's configured selection."""
    FULL = "full"
    DELTA = "delta"
    """Pages that a Δ-layer scored best (DELTA, Algorithm 2)."""


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Ask a decode worker for pages for prompt_tokens + max_tokens (0: prefill only).

    owner: an opaque digest of who may use the session; empty without auth. session_id, prefix_tokens: the
    pages of the session, or of so many remembered first tokens (whole pages), are shared; prompt_tokens
    counts what follows. reads_rest: the worker itself reads what follows the prefix; else a group sends it.
    key: finds the remembered tokens, and names what the request leaves; None: neither.
    keep_tokens, page_selection, recompute_blocks: the GenerateJob's, so that their pages are taken and a
    selection is refused before prefill. wait: for pages, until the deadline and the configured time at most.
    door: the asking one. append_tokens: come with the GenerateJob, after a prompt that a group sends.
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
    reads_rest: bool = False
    key: PromptKey | None = None
    append_tokens: int = 0
    recompute_blocks: int = 0

    @property
    def reads(self) -> bool:
        """Whether the worker itself reads prompt_tokens, which come with the GenerateJob."""
        return self.session_id is not None or self.reads_rest


def recompute_pages(blocks: int, tokens: int, *, appended: bool) -> int:
    """Count the pages for computing `blocks` blocks of `tokens` tokens again, since others may share the old
    ones. Without appended text the prompt's tail needs pages too."""
    blocks = min(blocks, max(0, tokens // BLOCK - 1))
    tail = 0 if appended else TAIL_TOKENS + BLOCK
    return (blocks * BLOCK + tail) // PAGE_TOKENS if blocks else 0


class RefusalReason(StrEnum):
    PAGES = "pages"
    """Too few are free now."""
    BUSY = "busy"
    """The queue is full."""
    TOO_LARGE = "too_large"
    """The pool could never hold it."""
    NO_SESSION = "no_session"
    """Unknown, expired, or somebody else's."""
    NO_PREFIX = "no_prefix"
    """The prompt's beginning is not remembered any more."""
    POSITIONS = "positions"
    """The model has too few for session and appended tokens."""
    SELECTION = "selection"
    DEADLINE = "deadline"
    DUPLICATE = "duplicate"
    """The id is in use here."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Nothing was taken. needed, free: pages. tokens_left: of the model's positions, for an answer.
    retry_after_s: when to ask again; None: never, or unknown."""

    reason: RefusalReason
    message: str
    needed: int = 0
    free: int = 0
    retry_after_s: float | None = None
    tokens_left: int = 0


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """held_tokens: of the session or the remembered prefix that the request builds on. host_tokens: so many
    of them came back from host memory. disk_tokens: from disk."""

    pages: int
    held_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class PrefillJob:
    """token_ids: little-endian uint32. decode_worker: the actor that reserved pages and gets the K/V. start:
    tokens to fetch from there instead of computing them, a multiple of BLOCK. attempt: how many came before.
    trace: the W3C `traceparent` above this work; empty: not recorded."""

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


@dataclass(frozen=True, kw_only=True)
class GenerateJob:
    """Decode from a prefilled prompt or from a session or prefix, plus appended tokens.

    keep_tokens: so many prompt tokens become a session when the first token is out. recompute_blocks:
    computed again densely before the first token. prompt_ids: the tokens before the appended ones, where
    blocks of them or of their session may be computed again; else empty. answered_tokens: the last append_ids
    that belong to the answer.
    """

    request_id: str
    sampling: Sampling
    append_ids: bytes = b""
    session_id: str | None = None
    page_selection: PageSelection = PageSelection.DEFAULT
    keep_tokens: int = 0
    keep_ttl_s: float = 0.0
    deadline: float | None = None
    trace: str = ""
    recompute_blocks: int = 0
    prompt_ids: bytes = field(repr=False, default=b"")
    answered_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class KeepSession:
    """Turn a finished prefill into a session once the last page is here. prompt_ids: as in `GenerateJob`."""

    request_id: str
    ttl_s: float
    deadline: float | None = None
    trace: str = ""
    prompt_ids: bytes = field(repr=False, default=b"")


class PrefillFailed(Exception):
    """A prefill ended without a result; str() is one plain line. The group may live on."""


class PrefillCancelled(PrefillFailed): ...


class DecodeFailed(Exception):
    """str() is one plain line."""
