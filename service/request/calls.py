"""Requests after checking, and the events that answer them: plain data, free of protobuf and Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...workers.messages import (
    DecodeReport,
    FinishReason,
    MethodSpec,
    PageSelection,
    PrefillReport,
    Progress,
    Sampling,
    Session,
    Token,
    Usage,
)
from .timings import TimeToFirstToken


@dataclass(frozen=True)
class PromptInput:
    """Exactly one of the three. token_ids: little-endian uint32, already checked. name: the request's
    field, for messages about it."""

    name: str
    text: str | None = field(default=None, repr=False)
    messages: tuple[Mapping[str, str], ...] | None = field(default=None, repr=False)
    token_ids: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class PrefillCall:
    """request_id: as the client gave it, for its own use. deadline: seconds since the epoch."""

    request_id: str
    owner: str
    prompt: PromptInput
    method: MethodSpec
    ttl_s: float
    deadline: float | None


@dataclass(frozen=True)
class GenerateCall:
    """prompt or session_id. keep_ttl_s: 0 unless the prompt is to become a session. sampling.max_tokens
    is the client's wish or the default; the model's positions may cut it."""

    request_id: str
    owner: str
    prompt: PromptInput | None
    session_id: str | None
    append: PromptInput | None
    method: MethodSpec
    sampling: Sampling
    stop: tuple[str, ...]
    page_selection: PageSelection
    keep_ttl_s: float
    deadline: float | None


@dataclass(frozen=True)
class Measured:
    """prefill: None when no prompt was read by a prefill group (a request on a session)."""

    ttft: TimeToFirstToken
    total_seconds: float
    prefill: PrefillReport | None = None
    decode: DecodeReport = field(default_factory=DecodeReport)


@dataclass(frozen=True)
class SessionMade:
    """Prefill's result."""

    request_id: str
    session: Session
    usage: Usage
    measured: Measured


@dataclass(frozen=True)
class Finished:
    """Generate's result. reason: stop, stop_string or length."""

    request_id: str
    reason: FinishReason
    text: str
    usage: Usage
    measured: Measured
    session: Session | None

    @property
    def page_share(self) -> float:
        """Pages attended over pages held by sparse layers; 1 when nothing was left out."""
        decode = self.measured.decode
        return decode.pages_attended / decode.pages_held if decode.pages_held else 1.0


Event = Progress | Token | SessionMade | Finished
