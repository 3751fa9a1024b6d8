"""What the client returns: plain dataclasses, made from the server's messages."""

from __future__ import annotations

from dataclasses import dataclass

from ...protos.v1 import deltafront_pb2 as pb
from ...workers.messages import FinishReason, Session, Usage

_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


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

    method: str
    mean: float
    layers: dict[int, float]
    scoring_overhead: float
    sampled_share: float


@dataclass(frozen=True)
class PrefillFinished:
    session: Session
    usage: Usage
    timings: Timings
    density: Density
    request_id: str


@dataclass(frozen=True)
class GenerateFinished:
    """reason: stop, stop_string or length. text: what was held back. density: of no method (empty name)
    when a session made reading a prompt unnecessary."""

    reason: FinishReason
    text: str
    usage: Usage
    timings: Timings
    density: Density
    session: Session | None
    page_share: float
    request_id: str


@dataclass(frozen=True)
class Method:
    name: str
    source: str
    defaults: dict[str, float]


@dataclass(frozen=True)
class ServerInfo:
    version: str
    model: str
    max_positions: int
    vocabulary: int
    default_method: str
    methods: list[Method]
    prefill_groups: int
    prefill_stages: int
    decode_workers: int
    chunk_tokens: int
    decode_pages_total: int
    decode_pages_free: int
    prefill_pages_total: int
    prefill_pages_free: int
    page_tokens: int
    metrics_address: str


def _session(session: pb.Session) -> Session:
    return Session(session.session_id, session.expires.ToMicroseconds() / 1e6, session.tokens)


def _usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def _timings(timings: pb.Timings) -> Timings:
    return Timings(
        timings.ttft_seconds,
        {part.name: part.seconds for part in timings.parts},
        [{phase.name: phase.seconds for phase in stage.phases} for stage in timings.stages],
        timings.total_seconds,
    )


def _density(density: pb.DensityReport) -> Density:
    layers = {one.layer: one.density for one in density.layers}
    return Density(density.method, density.mean, layers, density.scoring_overhead, density.sampled_share)


def prefill_finished(result: pb.PrefillResult) -> PrefillFinished:
    return PrefillFinished(
        _session(result.session),
        _usage(result.usage),
        _timings(result.timings),
        _density(result.density),
        result.request_id,
    )


def generate_finished(finish: pb.Finish) -> GenerateFinished:
    return GenerateFinished(
        _REASONS[finish.reason],
        finish.text,
        _usage(finish.usage),
        _timings(finish.timings),
        _density(finish.density),
        _session(finish.session) if finish.HasField("session") else None,
        finish.page_share,
        finish.request_id,
    )


def server_info(reply: pb.GetServerInfoResponse) -> ServerInfo:
    methods = [Method(one.name, one.source, dict(one.defaults)) for one in reply.methods]
    fields = [field.name for field in reply.DESCRIPTOR.fields if field.name != "methods"]
    return ServerInfo(**{name: getattr(reply, name) for name in fields}, methods=methods)
