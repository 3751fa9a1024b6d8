"""Workers' answers to a door while a request runs and when it ends."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_SCORING = ("anchors", "scoring", "selection")
"""Phases of a stage that say which tiles to compute."""


@dataclass(frozen=True, kw_only=True)
class LayerDensity:
    """The attention tiles of one layer, summed over heads, and the time for them.

    Attributes:
        computed, causal: Numbers of tiles.
        attention: Seconds spent in attention.
        choosing: Seconds spent on anchors, scoring, selection and correction.
    """

    layer: int
    computed: float
    causal: float
    attention: float = 0.0
    choosing: float = 0.0

    @property
    def density(self) -> float:
        return self.computed / self.causal if self.causal else 0.0


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
        wall: Seconds from the first chunk's start to the last stage's end.
        critical: The parts of `wall` in seconds: the last stage's phases, activation_wait, other_requests
            (chunks of other requests) and group_overhead (the rest).
        stages: Seconds of each stage's phases. Stages overlap in time.
        launch_bound: Seconds of each stage in chunks whose GPU waited for the host's launches.
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

    @property
    def mean_density(self) -> float:
        causal = sum(layer.causal for layer in self.density)
        return sum(layer.computed for layer in self.density) / causal if causal else 0.0

    @property
    def scoring_overhead(self) -> float:
        """The ratio of the time for anchors, scores and selection to the time for attention."""
        attention = sum(stage.get("attention", 0.0) for stage in self.stages)
        scoring = sum(stage.get(name, 0.0) for stage in self.stages for name in _SCORING)
        return scoring / attention if attention > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class ChunkRead:
    """A chunk was prefilled. `so_far` is the report up to this chunk's end."""

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
    """A session: a decode worker keeps a prompt's KV cache until `expires`, in seconds since the epoch."""

    session_id: str
    expires: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A prefix hit: a decode worker has the KV of a prompt's first `tokens` tokens in its prefix cache.

    Attributes:
        exact: Whether dense attention made all of it.
        disk_tokens: Number of its last tokens whose KV is on disk only.
        disk_s: Estimated seconds to load these from disk; 0: unknown.
    """

    tokens: int
    exact: bool = True
    disk_tokens: int = 0
    disk_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The token counts of a request.

    Attributes:
        cached_tokens: Prompt tokens whose KV was cached and not computed again.
        host_tokens, disk_tokens: How many of these were loaded from host memory, or from disk.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class DecodeReport:
    """The decode worker's parts of the time to first token, in seconds, and its page counts.

    Attributes:
        handoff_exposed: From the later of the job's and the logits' arrival to the last KV's arrival.
        decode_wait: From there until the scheduler admitted the request.
        append_prefill: Prefill of appended tokens.
        recompute: Recomputation of blocks and of the question.
        first_step: Sampling of the first token.
        pages_attended, pages_held: Pages that sparse layers attended to, and all pages, summed over layers
            and steps.
        own_steps: The request's share of decode steps: the sum of 1 / batch size over its steps.
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
    """Sent just before the first Token. `session` is the prompt's session, if the job asked for one."""

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
