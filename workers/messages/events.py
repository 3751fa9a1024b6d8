"""What workers answer a door with while a request runs, and when it ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class LayerDensity:
    """Tiles computed and causal tiles of one layer for one chunk or one prompt, summed over heads; seconds of
    attention there, and of choosing its tiles (anchors, scoring, selection, correction)."""

    layer: int
    computed: float
    causal: float
    attention: float = 0.0
    choosing: float = 0.0


def summed_by_layer(layers: Iterable[LayerDensity]) -> tuple[LayerDensity, ...]:
    """One for each layer, in their order, of several chunks or groups."""
    sums: dict[int, LayerDensity] = {}
    for layer in layers:
        before = sums.get(layer.layer, LayerDensity(layer.layer, 0.0, 0.0))
        sums[layer.layer] = LayerDensity(
            layer.layer,
            before.computed + layer.computed,
            before.causal + layer.causal,
            before.attention + layer.attention,
            before.choosing + layer.choosing,
        )
    return tuple(sums[layer] for layer in sorted(sums))


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
    launch_bound: of them, each stage's seconds with chunks in which its GPU waited for its host's launches.
    """

    queue: float
    wall: float
    critical: dict[str, float]
    stages: tuple[dict[str, float], ...]
    density: tuple[LayerDensity, ...]
    method: str
    sampled_share: float
    handoff_bytes: int
    launch_bound: tuple[float, ...] = ()


@dataclass(frozen=True)
class ChunkRead:
    """A prefill group has read a prompt up to token `tokens_done`. so_far: of its chunks until now."""

    tokens_done: int
    tokens_total: int
    so_far: PrefillReport


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
    NO_KV = "no_kv"
    """The prompt's K/V did not arrive."""
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
    was here. decode_wait: until the scheduler took it. append_prefill: reading appended tokens. recompute:
    computing blocks again that the question looks at, and the question over them. first_step: sampling the
    first token. pages_attended, pages_held: summed over sparse layers and steps. steps: decode steps that it
    was computed in. own_steps: those, each divided by the requests that it computed, so that the worker's
    steps are the sum over its requests. recomputed_tokens: of those blocks.
    """

    handoff_exposed: float = 0.0
    decode_wait: float = 0.0
    append_prefill: float = 0.0
    recompute: float = 0.0
    first_step: float = 0.0
    handoff_bytes: int = 0
    handoff_seconds: float = 0.0
    pages_attended: int = 0
    pages_held: int = 0
    steps: int = 0
    own_steps: float = 0.0
    recomputed_tokens: int = 0


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
