"""What a request is answered with: the same events in the door and in the client.

A Prefill is answered with Progress … and one PrefillFinished, a Generate with Progress …, one Usage when its
prompt has been read (which the gRPC contract leaves out), Token … and one GenerateFinished.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...workers.messages.events import FinishReason, PrefillReport, Progress, Session, Token, Usage
from ..metrics import density, scoring_overhead
from .timings import TtftClock


@dataclass(frozen=True)
class Timings:
    """Seconds. parts add up to ttft_seconds; stages overlap in time and do not."""

    ttft_seconds: float
    parts: dict[str, float]
    stages: list[dict[str, float]]
    total_seconds: float


@dataclass(frozen=True)
class Density:
    """Computed over causal tiles. layers: by layer number."""

    method: str = ""
    mean: float = 0.0
    layers: dict[int, float] = field(default_factory=dict)
    scoring_overhead: float = 0.0
    sampled_share: float = 0.0


@dataclass(frozen=True)
class PrefillFinished:
    """Prefill's result. trace_id: of the request's trace, 32 hexadecimal digits; empty if there is none."""

    session: Session
    usage: Usage
    timings: Timings
    density: Density
    request_id: str
    trace_id: str = ""


@dataclass(frozen=True)
class GenerateFinished:
    """Generate's result. reason: stop, stop_string or length. text: what was held back. density: of no
    method (empty name) when a session made reading a prompt unnecessary, and for an answer that goes on after
    a lost connection; its timings then leave out all reading. page_share: pages attended over pages held by
    sparse layers; 1 when nothing was left out. trace_id: as of a Prefill. recomputed_tokens: of the prompt or
    session, with dense attention, in all attempts."""

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


RequestEvent = Progress | Usage | Token | PrefillFinished | GenerateFinished


@dataclass(frozen=True)
class MethodInfo:
    """An attention method. source: its paper. defaults: its options."""

    name: str
    source: str
    defaults: dict[str, float]


@dataclass(frozen=True)
class ProfileLevel:
    """What `density` can ask for: calibrated for prompts of about `tokens`, for the method under options."""

    method: str
    options: dict[str, float]
    density: float
    tokens: int


@dataclass(frozen=True)
class ProfileInfo:
    """What was calibrated for the model. figures: JSON, what it reached on texts held out; may be empty."""

    model: str
    levels: list[ProfileLevel]
    figures: str


@dataclass(frozen=True)
class ServerInfo:
    """The model, its limits and methods; from prefill_groups to page_tokens the workers of this moment; then
    the layers and pages of page selection, the model's profile, if there is one, and how many blocks are
    computed again for a request that does not say. model: its id, which requests name; display_name: the same
    for people. chat_template: whether messages can be sent."""

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


def timings_of(clock: TtftClock, report: PrefillReport | None) -> Timings:
    """A request that ends now. report: None when no prefill group read anything."""
    ttft = clock.read()
    stages = [] if report is None else [dict(phases) for phases in report.stages]
    return Timings(ttft.seconds, dict(ttft.parts), stages, clock.elapsed)


def density_of(report: PrefillReport | None) -> Density:
    if report is None:
        return Density()
    layers = {layer.layer: density((layer,)) for layer in report.density}
    overhead = scoring_overhead(report)
    return Density(report.method, density(report.density), layers, overhead, report.sampled_share)
