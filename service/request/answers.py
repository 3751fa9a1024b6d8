"""The events of an answer, as door and Python client see them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from deltafront.service.request.calls import SamplingParams
from deltafront.workers.messages.events import FinishReason, Progress, Session, Token, Usage


@dataclass(frozen=True)
class Timings:
    """A request's times in seconds. `parts` add up to `ttft_seconds`. `stages` has the seconds of each
    prefill stage, which overlap."""

    ttft_seconds: float
    parts: dict[str, float]
    stages: list[dict[str, float]]
    total_seconds: float


@dataclass(frozen=True)
class Density:
    """The share of causal tiles that was computed, on average and by layer."""

    method: str = ""
    mean: float = 0.0
    layers: dict[int, float] = field(default_factory=dict)
    scoring_overhead: float = 0.0
    sampled_share: float = 0.0


@dataclass(frozen=True)
class PrefillFinished:
    session: Session
    usage: Usage
    timings: Timings
    density: Density
    request_id: str
    trace_id: str = ""


@dataclass(frozen=True)
class CallPart:
    """A piece of a tool call. Each call's first piece has its id and name."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class AnswerPart(NamedTuple):
    """A piece of an answer that is split into reasoning, content and tool calls."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPart, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ParsedToken(Token):
    """A token, with the reasoning, content and tool calls that the parser emits after it."""

    answer_parts: tuple[AnswerPart, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A complete tool call. `arguments`: a JSON object, as text."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class GenerateFinished:
    """The last event of an answer. If no prefill group ran, `density` names no method. `page_share`: share of
    pages that sparse layers attended to. `stop_string`: the one that ended the answer, or empty. The last
    three fields belong to parsed answers. `reasoning_tokens`: None if reasoning is not separated."""

    reason: FinishReason
    text: str
    usage: Usage
    timings: Timings
    density: Density
    session: Session | None
    page_share: float
    request_id: str
    trace_id: str = ""
    recomputed_tokens: int = 0
    stop_string: str = ""
    answer_parts: tuple[AnswerPart, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_tokens: int | None = None


@dataclass(frozen=True)
class Resumed:
    """The text of each token in `answered_ids`, sent before the further tokens of a resumed answer."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Echo:
    """A part of the prompt, before the answer: its text, or tokens with their log-probabilities."""

    text: str = ""
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class ChoiceEvent:
    """An event of one answer among several. `index` counts the choices of all prompts, `choice` the choices
    of its own prompt."""

    index: int
    choice: int
    event: Progress | Echo | Usage | Token | PrefillFinished | GenerateFinished


RequestEvent = Progress | Echo | Resumed | Usage | Token | PrefillFinished | GenerateFinished | ChoiceEvent


@dataclass(frozen=True)
class MethodInfo:
    name: str
    source: str
    defaults: dict[str, float]


@dataclass(frozen=True)
class ProfileLevel:
    """A density for which a profile has thresholds, at prompts of about `tokens` tokens."""

    method: str
    options: dict[str, float]
    density: float
    tokens: int


@dataclass(frozen=True)
class ProfileInfo:
    """`figures` is JSON with results on held-out texts, or empty."""

    model: str
    levels: list[ProfileLevel]
    figures: str


@dataclass(frozen=True)
class MeasuredInfo:
    """The setting that an evaluation of the model found (`workers.model.calibrated.profile.Measured`)."""

    setting: str
    tokens: list[int]
    samples: int
    density: float
    dense: float
    score: float
    kept: float
    low: float
    high: float
    lost: int
    won: int
    verdict: str


@dataclass(frozen=True)
class ServerInfo:
    """A server's model, limits and methods. `display_name` is the model's name for people."""

    version: str
    model: str
    max_positions: int
    vocabulary: int
    default_method: str
    methods: list[MethodInfo]
    prefill_stages: int
    chunk_tokens: int
    metrics_address: str
    prefill_groups: int = 0
    decode_workers: int = 0
    decode_pages_total: int = 0
    decode_pages_free: int = 0
    prefill_pages_total: int = 0
    prefill_pages_free: int = 0
    page_tokens: int = 0
    full_layers: list[int] = field(default_factory=list)
    delta_layers: list[int] = field(default_factory=list)
    page_budget: int = 0
    recency: int = 0
    profile: ProfileInfo | None = None
    recompute_blocks: int = 0
    display_name: str = ""
    chat_template: bool = False
    default_sampling: SamplingParams | None = None
    default_options: Mapping[str, float] = field(default_factory=dict)
    measured: MeasuredInfo | None = None
