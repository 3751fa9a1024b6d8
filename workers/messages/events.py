"""Workers' answers to a door while a request runs and when it ends."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, kw_only=True)
class LayerDensity:
    """The tiles of one layer, summed over heads, and their time.

    Attributes:
        computed, causal: Tiles.
        attention: Seconds of attention.
        choosing: Seconds of anchors, scoring, selection and correction.
    """

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
    """The time and the tiles of one prompt's prefill.

    Attributes:
        queue: Seconds from arrival to the first chunk's start.
        wall: Seconds from there to the last stage's end.
        critical: The parts of `wall`: the last stage's phases, activation_wait, other_requests (their chunks)
            and group_overhead (the rest).
        stages: The phases of each stage, which overlap in time.
        launch_bound: Seconds of each stage with chunks whose GPU waited for its host's launches.
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


@dataclass(frozen=True, kw_only=True)
class ChunkRead:
    """A chunk was prefilled. `so_far` is the report up to its end."""

    tokens_done: int
    tokens_total: int
    so_far: PrefillReport


@dataclass(frozen=True, kw_only=True)
class PrefillDone:
    request_id: str
    report: PrefillReport


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of the answer.

    Attributes:
        index: Counts from 0.
        logprob: Natural logarithm under the model's unmodified distribution.
        text: Set by the door; empty while characters or stop strings are incomplete.
    """

    index: int
    token_id: int
    logprob: float
    text: str = ""


class FinishReason(StrEnum):
    STOP = "stop"
    STOP_STRING = "stop_string"
    """The answer contains one of the request's stop strings. Only doors see text."""
    LENGTH = "length"
    """The answer has max_tokens tokens, or fills the model's positions."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"
    NO_KV = "no_kv"
    OTHER = "other"
    """A reason of a newer server, which only clients see."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A pinned prompt: a decode worker keeps its KV cache until `expires`, in seconds since the epoch."""

    session_id: str
    expires: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A prefix hit: a prompt's first `tokens` tokens, which a decode worker has in its prefix cache.

    Attributes:
        exact: Whether dense attention made all of it.
        disk_tokens: The number of its last tokens that are on disk alone.
        disk_s: Seconds until these are back; 0 if unknown.
    """

    tokens: int
    exact: bool = True
    disk_tokens: int = 0
    disk_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The tokens of a request.

    Attributes:
        cached_tokens: Prompt tokens that were not prefilled again.
        host_tokens, disk_tokens: How many of these came back from host memory, or from disk.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class DecodeReport:
    """Decode's share of TTFT, in seconds, and its page use.

    Attributes:
        handoff_exposed: From the job's or the logits' arrival, whichever is later, to the last KV's.
        decode_wait: Until the scheduler took it.
        append_prefill: Prefilling appended tokens.
        recompute: Recomputing blocks and the question.
        first_step: Sampling the first token.
        pages_attended, pages_held: Summed over sparse layers and steps.
        own_steps: The sum over steps of 1 / the requests in the step.
        recomputed_tokens: Tokens of the recomputed blocks.
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
    """Sent just before the first Token. `session` was made of the prompt, if the job asked for it."""

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
