"""Every type that crosses a process: frozen and free of torch, so that the front door may import it.

The life of a request in messages: the door asks a decode worker to `Reserve` pages, sends a `PrefillJob`
to a prefill group and reads `Progress` … `PrefillDone`; meanwhile the stages announce K/V to the
decode worker (`KVAnnouncement`, `FirstLogits`). The door then sends a `GenerateJob` (or `KeepSession`) to
the decode worker and reads `Token` … `FinishEvent`. Durations are seconds measured inside one
process; `deadline` is seconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..kernels.constants import BLOCK, PAGE_TOKENS
from ..kernels.methods import PRESETS, MethodError, MethodSpec, method_spec, reads_whole_prompts
from ..kernels.methods import load as load_methods

__all__ = [
    "BLOCK",
    "PAGE_TOKENS",
    "PRESETS",
    "MethodError",
    "MethodSpec",
    "load_methods",
    "method_spec",
    "reads_whole_prompts",
]


# --- requests ----------------------------------------------------------------------------------------


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
class Reserve:
    """Ask a decode worker for pages for prompt_tokens + max_tokens (max_tokens 0: prefill only).

    With session_id, only what exceeds the session's shared pages is taken; prompt_tokens then counts the
    appended tokens alone. owner: who may use the session (an opaque digest; empty without auth).
    keep_tokens, page_selection: as the GenerateJob will say, so that the page that a kept session needs for
    itself is taken now and a selection that is not available is refused before any prefill. wait: for pages,
    where there are too few, as long as the worker's configuration says and until the deadline at most.
    door: who asks. prefix_tokens: build on so many tokens of the session alone (whole pages);
    0: on all of them.
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
    """A worker's no; nothing was taken. retry_after_s: when it may be a yes; None: never, or unknown."""

    reason: RefusalReason
    message: str
    needed: int = 0
    free: int = 0
    retry_after_s: float | None = None


@dataclass(frozen=True)
class Reserved:
    """A worker's yes. session_tokens: length of the session's prefix that the request builds on."""

    pages: int
    session_tokens: int = 0


@dataclass(frozen=True)
class PrefillJob:
    """What a prefill group needs. token_ids: little-endian uint32. decode_worker: the actor name that
    reserved pages for request_id; K/V is announced to it."""

    request_id: str
    token_ids: bytes
    method: MethodSpec
    decode_worker: str
    deadline: float | None = None
    wants_logits: bool = True

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // 4


@dataclass(frozen=True)
class GenerateJob:
    """Decode from a request's prefilled K/V (session_id None) or from a session plus appended tokens.

    keep_tokens: if positive, the first
    keep_tokens of prompt K/V become a session of ttl seconds when the first token is out, found by `chain`.
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


@dataclass(frozen=True)
class KeepSession:
    """Turn a finished prefill into a session, found by `chain`; waits until the last page has been pulled."""

    request_id: str
    ttl_s: float
    deadline: float | None = None
    chain: bytes = field(repr=False, default=b"")


class PrefillFailed(Exception):
    """A prefill ended without a result: str() is one plain line. The group may or may not live on."""


class PrefillCancelled(PrefillFailed):
    """It was cancelled by id."""


class DecodeFailed(Exception):
    """A prompt's K/V could not be received, so there is nothing to keep: str() is one plain line."""


# --- inside a prefill group -----------------------------------------------------------------------------


class RequestFailed(Exception):
    """One request cannot go on at a stage; the stage and its other requests can."""


@dataclass(frozen=True)
class OpenRequest:
    """First command of a request on every stage: its pages there and whom its K/V is announced to.

    serial: unique in the group for ever, unlike the request's id; what `abandon` names."""

    request_id: str
    pages: tuple[int, ...]
    prompt_tokens: int
    method: MethodSpec
    decode_worker: str
    serial: int = 0


@dataclass(frozen=True)
class ChunkCommand:
    """Run one chunk: tokens start .. start+len-1. token_ids (uint32) only matters to the first stage."""

    request_id: str
    start: int
    tokens: int
    last: bool
    wants_logits: bool
    token_ids: bytes = field(repr=False, default=b"")


@dataclass(frozen=True)
class LayerDensity:
    """Tiles computed and causal tiles of one layer for one chunk or one prompt, summed over heads."""

    layer: int
    computed: float
    causal: float


@dataclass(frozen=True)
class ChunkReport:
    """What one stage did for one chunk. phases: seconds by name (projection, anchors, scoring, selection,
    attention, correction, kv_write, handoff, activation_wait, activation_send); they lie within wall."""

    request_id: str
    stage: int
    start: int
    wall: float
    phases: dict[str, float]
    density: tuple[LayerDensity, ...]
    sampled_share: float
    handoff_bytes: int


# --- hand-off ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KVAnnouncement:
    """K/V of layers layer .. layer+layers-1 for tokens start .. start+tokens-1, ready to be pulled.

    payload: what the transport's two ends agreed on, opaque to everybody else."""

    request_id: str
    layer: int
    start: int
    tokens: int
    payload: Any = field(repr=False)
    layers: int = 1


@dataclass(frozen=True)
class FirstLogits:
    """Logits of the prompt's last position, float32 [V] (numpy), from the last stage."""

    request_id: str
    logits: Any = field(repr=False)


# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """How much of a prompt has been read."""

    tokens_done: int
    tokens_total: int


@dataclass(frozen=True)
class PrefillReport:
    """Time and density of one prompt's prefill.

    queue: from the job's arrival to its first chunk's start. wall: from there to the last stage's end.
    critical: seconds by part that add up to wall: the last stage's own phases, activation_wait (blocked on
    the stage before), other_requests (running somebody else's chunk) and group_overhead (the remainder).
    stages: each stage's phases, summed over chunks (they overlap in time, so they do not add up to wall).
    """

    queue: float
    wall: float
    critical: dict[str, float]
    stages: tuple[dict[str, float], ...]
    density: tuple[LayerDensity, ...]
    method: str
    sampled_share: float
    handoff_bytes: int


@dataclass(frozen=True)
class PrefillDone:
    request_id: str
    report: PrefillReport


@dataclass(frozen=True)
class Token:
    """One token of an answer, the index-th from 0. logprob: natural log of its probability under the model's
    unmodified distribution. text: what the door adds of the answer's text; empty on a worker, and while
    characters or stop strings are incomplete."""

    index: int
    token_id: int
    logprob: float
    text: str = ""


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence token."""
    STOP_STRING = "stop_string"
    """One of the request's stop strings; only the door sees text."""
    LENGTH = "length"
    """max_tokens, or the model's positions."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"
    OTHER = "other"
    """A reason that only a newer server knows; seen by clients alone."""


@dataclass(frozen=True)
class Session:
    """A prompt whose K/V is kept on a decode worker. expires: seconds since the epoch."""

    session_id: str
    expires: float
    tokens: int


LINK_BYTES = 16
"""Of a chain: one link for each full page of a prompt, from the link before and the page's token ids. Two
chains that agree at a link agree in everything before it."""


@dataclass(frozen=True)
class Prefix:
    """What a session holds of a prompt: its first `tokens`, which are whole pages."""

    session_id: str
    tokens: int


@dataclass(frozen=True)
class Usage:
    """Tokens of one request. cached_tokens: those of the prompt that were not read again."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class DecodeReport:
    """Decode's share of TTFT and its page use.

    handoff_exposed: from the job's arrival (or the logits' arrival, whichever is later) until the last page
    was here. decode_wait: until the scheduler took it. append_prefill: reading appended tokens.
    first_step: sampling the first token. pages_attended, pages_held: summed over sparse layers and steps.
    """

    handoff_exposed: float = 0.0
    decode_wait: float = 0.0
    append_prefill: float = 0.0
    first_step: float = 0.0
    handoff_bytes: int = 0
    handoff_seconds: float = 0.0
    pages_attended: int = 0
    pages_held: int = 0


@dataclass(frozen=True)
class FirstTokenTimings:
    """Sent just before the first Token. session: what was kept of the prompt, if that was asked for."""

    request_id: str
    report: DecodeReport
    session: Session | None = None


@dataclass(frozen=True)
class FinishEvent:
    """The one terminal event of a request on a worker."""

    request_id: str
    reason: FinishReason
    completion_tokens: int
    report: DecodeReport
    message: str = ""


@dataclass(frozen=True)
class SessionKept:
    request_id: str
    session: Session
    report: DecodeReport


# --- state that the door reads -----------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupStats:
    """A prefill group as admission sees it. tokens_per_second: recent prefill rate (0: none seen yet).
    waiting_tokens: prompt tokens admitted and not yet computed. nodes: where its stages are (empty:
    unknown). draining: it ends what it has and wants nothing new."""

    name: str
    pages_total: int
    pages_free: int
    running: int
    waiting: int
    waiting_tokens: int
    tokens_per_second: float
    nodes: tuple[str, ...] = ()
    draining: bool = False


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
    """A decode worker as admission sees it. uses: by owner and door. node: where it is (empty: unknown).
    draining: it ends what it has, sessions included, and wants no new prompts."""

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


NAMESPACE = "deltafront"
"""Ray namespace of the actors below; sessions name their decode worker, so any door can find it."""
PREFILL_PREFIX = "prefill:"
DECODE_PREFIX = "decode:"
