"""What goes on inside a prefill group, and what its stages hand to decode workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .events import LayerDensity
from .methods import MethodSpec
from .requests import DecodeFailed, PrefillFailed


class RequestFailed(Exception):
    """One request cannot go on at a stage; the stage and its other requests can."""


class HandoffFailed(RequestFailed, PrefillFailed, DecodeFailed):
    """A prompt's K/V did not get from a stage to its decode worker, whichever of them says so."""


@dataclass(frozen=True)
class OpenRequest:
    """First command of a request on every stage: its pages there and whom its K/V is announced to.

    serial: unique in the group for ever, unlike the request's id; what `abandon` names. start: tokens whose
    K/V is to be brought from the decode worker. attempt: as in `PrefillJob`."""

    request_id: str
    pages: tuple[int, ...]
    prompt_tokens: int
    method: MethodSpec
    decode_worker: str
    serial: int = 0
    start: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class ChunkCommand:
    """Run one chunk: tokens start .. start+len-1. token_ids (uint32) only matters to the first stage."""

    request_id: str
    start: int
    tokens: int
    last: bool
    wants_logits: bool
    token_ids: bytes = field(repr=False, default=b"")
    trace: str = ""


@dataclass(frozen=True)
class ChunkReport:
    """What one stage did for one chunk. phases: seconds by name (projection, anchors, scoring, selection,
    attention, correction, kv_gather, handoff, activation_wait, activation_send); they lie within wall.
    lead: seconds between the last launch on a GPU and the chunk's end there; None on a CPU."""

    request_id: str
    stage: int
    start: int
    wall: float
    phases: dict[str, float]
    density: tuple[LayerDensity, ...]
    sampled_share: float
    handoff_bytes: int
    lead: float | None = None


@dataclass(frozen=True)
class KVAnnouncement:
    """K/V of layers layer .. layer+layers-1 for tokens start .. start+tokens-1, ready to be pulled.

    payload: what the transport's two ends agreed on, opaque to everybody else. attempt: as in
    `PrefillJob`."""

    request_id: str
    layer: int
    start: int
    tokens: int
    payload: Any = field(repr=False)
    layers: int = 1
    attempt: int = 0


@dataclass(frozen=True)
class KVRange:
    """K/V of one layer for tokens start .. start+tokens-1 that a stage wants back."""

    request_id: str
    layer: int
    start: int
    tokens: int


@dataclass(frozen=True)
class HostKV:
    """What a KVRange was asked for: host arrays k and v, [tokens, kv_heads, head_dim]."""

    k: Any = field(repr=False)
    v: Any = field(repr=False)


@dataclass(frozen=True)
class FirstLogits:
    """Logits of the prompt's last position, float32 [V] (numpy), from the last stage. attempt: as in
    `PrefillJob`."""

    request_id: str
    logits: Any = field(repr=False)
    attempt: int = 0
