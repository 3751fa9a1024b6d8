"""A door's requests to prefill groups and decode workers, and their refusals and failures."""

import sys
from dataclasses import dataclass, field
from enum import StrEnum

from deltafront.kernels.constants import BLOCK, PAGE_TOKENS
from deltafront.kernels.methods import MethodSpec
from deltafront.workers.messages.prompts import PromptKey

ID_BYTES = 4
"""Bytes of a packed token id, a little-endian uint32."""
if sys.byteorder != "little":
    raise ImportError("Deltafront packs numbers as this machine has them, so it needs a little-endian one")
TAIL_TOKENS = 128
"""Without appended text, this many last tokens count as the question. Up to a block more do, so that whole
blocks precede it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy; top_k 0 and top_p 1 are off.

    With a seed, the tokens do not depend on the batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 256
    ignore_eos: bool = False


class PageSelection(StrEnum):
    DEFAULT = ""
    """The worker's configured choice."""
    FULL = "full"
    DELTA = "delta"
    """The pages that a Δ-layer scored best (DELTA, Algorithm 2)."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """A request's options on every worker. A door sends them to the decode worker once, with the reservation.

    Attributes:
        page_selection: The page selection of decode steps.
        recompute_blocks: Blocks of the prompt to recompute densely before the first token.
        keep_ttl_s: Seconds for which a session of the prompt is kept.
        deadline: Seconds since the epoch.
        trace: The W3C `traceparent` of the parent span; empty: not traced.
        constraint: The grammar that the answer follows, in llguidance's form; empty: none.
    """

    page_selection: PageSelection = PageSelection.DEFAULT
    recompute_blocks: int = 0
    keep_ttl_s: float = 0.0
    deadline: float | None = None
    trace: str = ""
    constraint: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Asks a decode worker to reserve pages for a request.

    The request may build on held tokens, those of a session or a cached prefix, whose pages it shares.

    Attributes:
        owner: A digest of the caller, who alone may use the session; empty without authentication.
        new_tokens: Prompt tokens after the held ones, including appended text. A group or the worker prefills
            them.
        max_tokens: Answer tokens still to generate; 0: prefill only.
        session_id: The session that it builds on.
        prefix_tokens: Tokens of the cached prefix that it starts with, in whole pages.
        reads_rest: Whether the worker itself prefills the tokens after the prefix; otherwise a prefill group
            does.
        key: Finds the prefix, and makes the request's KV findable; None: neither.
        keep_tokens: As in `GenerateJob`.
        options: The request's options. They reserve pages for recomputed blocks, and an impossible page
            selection is refused before prefill.
        wait: Whether to wait for pages, until the deadline and for the configured time at most.
        door: The name of the door that asks.
        resume_tokens: Answer tokens that were already streamed, if a group prefills the prompt. Their ids
            come with the `GenerateJob`.
    """

    request_id: str
    owner: str
    new_tokens: int
    max_tokens: int
    session_id: str | None = None
    keep_tokens: int = 0
    options: RequestOptions = RequestOptions()
    wait: bool = False
    door: str = ""
    prefix_tokens: int = 0
    reads_rest: bool = False
    key: PromptKey | None = None
    resume_tokens: int = 0

    @property
    def reads(self) -> bool:
        """Say whether the worker itself prefills the new tokens, whose ids then come with the
        `GenerateJob`.
        """
        return self.session_id is not None or self.reads_rest


def recompute_pages(blocks: int, tokens: int, *, appended: bool) -> int:
    """Return the number of new pages needed to recompute `blocks` blocks of a prompt of `tokens` tokens.
    Other requests may share the old pages.

    Without appended text, the prompt's last tokens need new pages, too.
    """
    blocks = min(blocks, max(0, tokens // BLOCK - 1))
    tail = 0 if appended else TAIL_TOKENS + BLOCK
    return (blocks * BLOCK + tail) // PAGE_TOKENS if blocks else 0


class RefusalReason(StrEnum):
    PAGES = "pages"
    """Too few pages are free now."""
    BUSY = "busy"
    """The group's queue is full."""
    TOO_LARGE = "too_large"
    """The request needs more pages than there are."""
    NO_SESSION = "no_session"
    """The session is unknown, expired, or another owner's."""
    NO_PREFIX = "no_prefix"
    """The prompt's prefix is no longer cached."""
    POSITIONS = "positions"
    """The request needs more positions than the model has."""
    SELECTION = "selection"
    DEADLINE = "deadline"
    DUPLICATE = "duplicate"
    """The id is in use."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A worker's refusal: it reserved or accepted nothing.

    Attributes:
        needed, free: Numbers of pages.
        retry_after_s: Seconds after which to ask again; None: never, or unknown.
        tokens_left: Positions of the model that the prompt leaves for an answer.
    """

    reason: RefusalReason
    message: str
    needed: int = 0
    free: int = 0
    retry_after_s: float | None = None
    tokens_left: int = 0


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """The worker has reserved the pages.

    Attributes:
        held_tokens: Tokens of the session or prefix that the request builds on.
        host_tokens, disk_tokens: How many of these are loaded from host memory, or from disk.
    """

    pages: int
    held_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class PrefillJob:
    """Asks a prefill group to prefill a prompt.

    Attributes:
        token_ids: Little-endian uint32.
        decode_worker: The actor that reserved pages and gets the KV.
        start: Number of first tokens, a multiple of BLOCK, whose KV stages fetch from the decode worker
            instead of computing it.
        attempt: Number of earlier attempts.
        trace: The W3C `traceparent` of the parent span; empty: not traced.
    """

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
    """Asks a decode worker to answer a request with a reservation. The reservation's options apply.

    Attributes:
        extend_ids: Packed ids of the tokens that the worker prefills itself: text after a session or prefix,
            and answer tokens that were already streamed.
        keep_tokens: Number of first prompt tokens that become a session once the first token is sent.
        prompt_ids: Packed ids of the tokens before the appended ones; empty unless blocks may be recomputed,
            now or in a later request on the session.
        answered_tokens: Number of last `extend_ids` that belong to the answer.
    """

    request_id: str
    sampling: Sampling
    extend_ids: bytes = b""
    keep_tokens: int = 0
    prompt_ids: bytes = field(repr=False, default=b"")
    answered_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class KeepSession:
    """Asks a decode worker to make a session of a reserved request's prompt, once its KV is complete.

    Attributes:
        prompt_ids: As in `GenerateJob`.
    """

    request_id: str
    prompt_ids: bytes = field(repr=False, default=b"")


class PrefillFailed(Exception):
    """A prefill ended without a result. str() is one line. The group may still be alive."""


class PrefillCancelled(PrefillFailed): ...


class DecodeFailed(Exception):
    """A decode worker's request failed. str() is one line."""
