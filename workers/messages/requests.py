"""The API server's messages to prefill groups and decode workers, and the workers' refusals and failures."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from deltafront.kernels.constants import BLOCK, PAGE_TOKENS
from deltafront.kernels.methods import MethodSpec
from deltafront.workers.messages.prompts import PromptKey
from deltafront.workers.messages.service_tiers import ServiceTier

ID_BYTES = 4
"""Size of a packed token id, which is a little-endian uint32."""
if sys.byteorder != "little":
    raise ImportError("Deltafront packs numbers as this machine has them, so it needs a little-endian one")
TAIL_TOKENS = 128
"""Number of last prompt tokens that count as the question if no text is appended. The question is made longer
by up to a block, so that it begins at a block boundary."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters, with vLLM's meaning. Temperature 0 is greedy; top_k 0 and top_p 1 are off.

    With a seed, the sampled tokens do not depend on the other requests of the batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 256
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_logprobs: int = 0

    @property
    def changes_logits(self) -> bool:
        """True if an option changes logits before a token is sampled."""
        penalised = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        return bool(penalised or self.logit_bias or self.min_tokens or self.min_p)


class PageSelection(StrEnum):
    DEFAULT = ""
    """Use the worker's configuration."""
    FULL = "full"
    DELTA = "delta"
    """Attend to the pages that a Δ-layer scored highest (DELTA, Algorithm 2)."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """A request's options. The API server sends them to the decode worker once, with the reservation.

    Attributes:
        page_selection: The pages that decode steps attend to.
        recompute_blocks: Number of blocks of the prompt to recompute densely before the first token.
        keep_ttl_s: Seconds for which the prompt is kept as a session.
        deadline: Seconds since the epoch.
        trace: The W3C `traceparent` of the parent span; empty: not traced.
        constraint: The grammar that the answer must match, in llguidance's format; empty: none.
        prompt_logprobs: Number of likeliest tokens to return at each token of the prompt, with that token's
            log-probability. The decode worker then prefills the whole prompt. None: no log-probabilities.
        logprobs_from: The first position whose log-probability is wanted. Chunks that end before it return
            none.
        shadow: True if the request only prefills an answer again, to compare it with dense attention. The
            worker refuses it while it has any other request, and ends it when one comes.
    """

    page_selection: PageSelection = PageSelection.DEFAULT
    recompute_blocks: int = 0
    keep_ttl_s: float = 0.0
    deadline: float | None = None
    trace: str = ""
    constraint: str = field(default="", repr=False)
    prompt_logprobs: int | None = None
    logprobs_from: int = 0
    shadow: bool = False
    service_tier: ServiceTier = ServiceTier.DEFAULT


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Asks a decode worker to reserve pages for a request.

    The request may extend a session or a cached prefix, whose tokens are the held tokens. It then shares
    their pages.

    Attributes:
        owner: Digest of the caller, who alone may use the session; empty without authentication.
        new_tokens: Number of prompt tokens after the held ones, including appended text. A prefill group or
            the decode worker prefills them.
        max_tokens: Maximum number of answer tokens that are still to generate; 0: prefill only.
        session_id: The session that the request extends.
        prefix_tokens: Number of tokens of the cached prefix that the request extends, in whole pages.
        reads_rest: True if the decode worker prefills the tokens after the prefix. If not, a prefill group
            does.
        key: The prefix-cache key of the prompt; None: no cached pages are used, and none are cached.
        keep_tokens: As in `GenerateJob`.
        options: The request's options. The worker also reserves pages for recomputed blocks, and refuses an
            impossible page selection before prefill.
        wait: True if the request may wait for free pages, until the deadline and at most `decode.max_wait_s`.
        door: The name of the API server that asks.
        resume_tokens: Number of answer tokens that the client already has, if a prefill group prefills the
            prompt. The `GenerateJob` brings their ids.
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
        """True if the decode worker prefills the new tokens. The `GenerateJob` then brings their ids."""
        return self.session_id is not None or self.reads_rest


def recompute_pages(blocks: int, tokens: int, *, appended: bool) -> int:
    """Return the number of new pages that recomputing `blocks` blocks of a prompt of `tokens` tokens takes.

    The old pages cannot be overwritten, since other requests may share them. Without appended text, the
    prompt's last tokens (the question) are recomputed into new pages, too.
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
    """The request needs more pages than the worker has in all."""
    NO_SESSION = "no_session"
    """The session is unknown, expired, or another owner's."""
    NO_PREFIX = "no_prefix"
    """The prompt's prefix is no longer cached."""
    POSITIONS = "positions"
    """The request needs more positions than the model has."""
    SELECTION = "selection"
    DEADLINE = "deadline"
    DUPLICATE = "duplicate"
    """A request with this id is already running."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A worker's refusal of a request. The worker has reserved nothing.

    Attributes:
        needed, free: Number of pages that the request needs, and of free pages.
        retry_after_s: Seconds after which to ask again; None: never, or unknown.
        tokens_left: Number of answer tokens that fit into the model's positions after the prompt.
    """

    reason: RefusalReason
    message: str
    needed: int = 0
    free: int = 0
    retry_after_s: float | None = None
    tokens_left: int = 0


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """A decode worker's answer: it has reserved `pages` pages.

    Attributes:
        held_tokens: Number of tokens of the session or cached prefix that the request extends.
        host_tokens, disk_tokens: Held tokens whose KV is loaded from host memory, or from disk.
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
        decode_worker: Name of the actor that has reserved pages and receives the KV.
        start: The first token to prefill, a multiple of BLOCK. Stages fetch the KV of earlier tokens from the
            decode worker.
        attempt: Number of earlier attempts.
        trace: The W3C `traceparent` of the parent span; empty: not traced.
        state_places: Numbers of tokens after which the decode worker needs the state of layers that have one,
            ascending.
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
    service_tier: ServiceTier = ServiceTier.DEFAULT
    state_places: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // 4


@dataclass(frozen=True, kw_only=True)
class GenerateJob:
    """Asks a decode worker to generate the answer of a request that has a reservation. Packed ids are
    little-endian uint32.

    Attributes:
        extend_ids: Packed ids of the tokens that the decode worker prefills: text after a session or cached
            prefix, then answer tokens that the client already has.
        keep_tokens: Number of first prompt tokens that become a session once the first token is sent.
        prompt_ids: Packed ids of the prompt tokens before `extend_ids`; empty unless blocks may be
            recomputed, now or in a later request on the session.
        answered_tokens: Number of tokens at the end of `extend_ids` that belong to the answer.
        distinct_ids: Packed ids of the prompt's distinct tokens, for a repetition penalty.
    """

    request_id: str
    sampling: Sampling
    extend_ids: bytes = b""
    keep_tokens: int = 0
    prompt_ids: bytes = field(repr=False, default=b"")
    answered_tokens: int = 0
    distinct_ids: bytes = field(repr=False, default=b"")


@dataclass(frozen=True, kw_only=True)
class KeepSession:
    """Asks a decode worker to keep a request's prompt as a session, once all its KV has arrived.

    Attributes:
        prompt_ids: As in `GenerateJob`.
    """

    request_id: str
    prompt_ids: bytes = field(repr=False, default=b"")


class PrefillFailed(Exception):
    """A prompt could not be prefilled. str() is one line. The prefill group may still be alive."""


class PrefillCancelled(PrefillFailed): ...


class DecodeFailed(Exception):
    """A request failed on a decode worker. str() is one line."""
