"""Workers' answers to a door while a request runs and when it ends."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, kw_only=True)
class LayerDensity:
    """One layer's tiles, summed over heads. attention, choosing: seconds of attention, and of anchors,
    scoring, selection and correction."""

    layer: int
    computed: float
    causal: float
    attention: float = 0.0
    choosing: float = 0.0


def summed_by_layer(layers: Iterable[LayerDensity]) -> tuple[LayerDensity, ...]:
    sums: dict[int, LayerDensity] = {}
    for added in layers:
        before = sums.get(added.layer, LayerDensity(layer=added.layer, computed=0.0, causal=0.0))
        values = {name: value + getattr(added, name) for name, value in vars(before).items()}
        sums[added.layer] = LayerDensity(**{**values, "layer": added.layer})
    return tuple(sums[layer] for layer in sorted(sums))


@dataclass(frozen=True, kw_only=True)
class Progress:
    tokens_done: int
    tokens_total: int


@dataclass(frozen=True, kw_only=True)
class PrefillReport:
    """queue: from arrival to its first chunk's start. wall: from there to the last stage's end. critical:
    parts that sum to wall: the last stage's phases, activation_wait, other_requests (others' chunks) and
    group_overhead (the rest). stages: each stage's phases, which overlap in time. launch_bound: each stage's
    seconds with chunks whose GPU waited for its host's launches."""

    queue: float
    wall: float
    critical: dict[str, float]
    stages: tuple[dict[str, float], ...]
    density: tuple[LayerDensity, ...]
    method: str
    sampled_share: float
    handoff_bytes: int
    launch_bound: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChunkRead:
    """so_far: the report of the chunks read."""

    tokens_done: int
    tokens_total: int
    so_far: PrefillReport


@dataclass(frozen=True, kw_only=True)
class PrefillDone:
    request_id: str
    report: PrefillReport


@dataclass(frozen=True, kw_only=True)
class Token:
    """index: from 0. logprob: natural log under the model's unmodified distribution. text: added by the door;
    empty while characters or stop strings are incomplete."""

    index: int
    token_id: int
    logprob: float
    text: str = ""


class FinishReason(StrEnum):
    STOP = "stop"
    STOP_STRING = "stop_string"
    """One of the request's; only the door sees text."""
    LENGTH = "length"
    """max_tokens, or the model's positions."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"
    NO_KV = "no_kv"
    OTHER = "other"
    """A newer server's reason; only clients see it."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A prompt whose K/V a decode worker keeps. expires: seconds since the epoch."""

    session_id: str
    expires: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A prompt's first `tokens` tokens, whose K/V a decode worker remembers.

    exact: all made by dense attention. disk_tokens: so many, the last of them, are on disk alone. disk_s: the
    seconds that these take to come back; 0 where nobody knows.
    """

    tokens: int
    exact: bool = True
    disk_tokens: int = 0
    disk_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """cached_tokens: of the prompt, not read again. host_tokens, disk_tokens: so many of those came back from
    host memory, or from disk."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class DecodeReport:
    """Decode's share of TTFT and its page use.

    handoff_exposed: from the job's or the logits' arrival, whichever is later, to the last page's.
    decode_wait: until the scheduler took it. append_prefill: reading appended tokens. recompute: computing
    blocks and the question again. first_step: sampling the first token. pages_attended, pages_held: summed
    over sparse layers and steps. own_steps: steps, each divided by the requests in it. recomputed_tokens:
    of those blocks.
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


@dataclass(frozen=True, kw_only=True)
class FirstTokenTimings:
    """Sent just before the first Token. session: made of the prompt, if asked for."""

    request_id: str
    report: DecodeReport
    session: Session | None = None


@dataclass(frozen=True, kw_only=True)
class FinishEvent:
    request_id: str
    reason: FinishReason
    completion_tokens: int
    report: DecodeReport
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class SessionKept:
    request_id: str
    session: Session
    report: DecodeReport
