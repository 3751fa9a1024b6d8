"""Events that workers send to the API server while a request runs and when it ends."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_SCORING = ("anchors", "scoring", "selection")
"""Phases of a stage that select the attention tiles to compute."""


@dataclass(frozen=True, kw_only=True)
class LayerDensity:
    """Attention tiles of one layer, summed over heads, and the time spent on them.

    Attributes:
        computed, causal: Number of computed tiles, and of all causal tiles.
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
    """Number of prompt tokens prefilled so far.

    `expected_first_token_seconds`, from the request's arrival, is predicted before prefill, in a request's
    first event; 0: not known.
    `tiles` are those of all tokens so far.
    """

    tokens_done: int
    tokens_total: int
    expected_first_token_seconds: float = 0.0
    tiles: tuple[LayerDensity, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PrefillReport:
    """The time and the tiles of one prompt's prefill.

    Attributes:
        queue: Seconds from arrival to the first chunk's start.
        wall: Seconds from the first chunk's start to the last stage's end.
        critical: The parts of `wall` in seconds: the last stage's phases, activation_wait, other_requests
            (chunks of other requests) and group_overhead (the rest).
        stages: For each stage, the seconds of its phases. Stages overlap in time.
        launch_bound: For each stage, the seconds of chunks in which the GPU waited for kernel launches.
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
        """The time for anchors, scoring and selection, divided by the time for attention."""
        attention = sum(stage.get("attention", 0.0) for stage in self.stages)
        scoring = sum(stage.get(name, 0.0) for stage in self.stages for name in _SCORING)
        return scoring / attention if attention > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class PrefillQueued:
    """A prefill group has queued a prompt.

    Attributes:
        expected_s: Predicted seconds until the prompt is prefilled.
    """

    expected_s: float


@dataclass(frozen=True, kw_only=True)
class ChunkRead:
    """One chunk has been prefilled. `so_far` is the report up to the end of this chunk."""

    tokens_done: int
    tokens_total: int
    so_far: PrefillReport


@dataclass(frozen=True, kw_only=True)
class PrefillDone:
    request_id: str
    report: PrefillReport


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of the answer.

    Attributes:
        index: Counts from 0.
        logprob: The token's natural log probability, before temperature, top_p and top_k. NaN for a prompt's
            first token, which has none.
        text: Set by the API server; empty while a character or a stop string is incomplete.
        top: The likeliest tokens at this position, the likeliest first; the request sets their number.
    """

    index: int
    token_id: int
    logprob: float
    text: str = ""
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """Tokens of the prompt that follow one another. Their `index` is their position."""

    tokens: tuple[Token, ...]


class FinishReason(StrEnum):
    STOP = "stop"
    STOP_STRING = "stop_string"
    """The answer contains one of the request's stop strings. Only the API server checks this."""
    LENGTH = "length"
    """The answer has max_tokens tokens, or has reached the model's last position."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"
    NO_KV = "no_kv"
    GRAMMAR = "grammar"
    """The grammar compiler's resource limits were reached within the answer."""
    OTHER = "other"
    """A client reports this if a newer server sends a reason that it does not know."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A prompt's KV cache that a decode worker keeps for a client until `expires` (seconds since the
    epoch)."""

    session_id: str
    expires: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A prefix hit: a decode worker has the KV of a prompt's first `tokens` tokens in its prefix cache.

    Attributes:
        exact: True if dense attention computed all of this KV.
        disk_tokens: Number of tokens, at the end of the hit, whose KV is only on disk.
        disk_s: Estimated seconds to load that KV from disk; 0: unknown.
        has_state: True if the model's layers have states. Then the decode worker can continue the prefix only
            after exactly `tokens` tokens.
        group_tokens: With `has_state`: the tokens after which a group can continue, a multiple of BLOCK.
    """

    tokens: int
    exact: bool = True
    disk_tokens: int = 0
    disk_s: float = 0.0
    has_state: bool = False
    group_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The token counts of a request.

    Attributes:
        cached_tokens: Prompt tokens whose KV came from the prefix cache or a session.
        host_tokens, disk_tokens: Cached tokens whose KV was loaded from host memory, or from disk.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class DecodeReport:
    """A decode worker's measurements of one request. Durations are seconds of the time to first token.

    Attributes:
        handoff_exposed: Wait for the last KV after the job and the prompt's logits have arrived.
        decode_wait: Wait after that, until the scheduler admits the request.
        append_prefill: Prefill of appended tokens by the decode worker.
        recompute: Dense recomputation of blocks and of the question.
        first_step: Sampling of the first token.
        pages_attended, pages_held: Pages that sparse layers attended to, and pages that these layers had,
            both summed over layers and steps.
        own_steps: The sum of 1 / batch size over the request's decode steps.
        recomputed_tokens: Number of tokens in the recomputed blocks.
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
    """Event before the first Token. `session` is set if the job asked to keep the prompt as a session."""

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
