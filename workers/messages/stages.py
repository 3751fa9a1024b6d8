"""Messages inside a prefill group, and from its stages to decode workers."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .events import LayerDensity
from .methods import MethodSpec
from .requests import DecodeFailed, PrefillFailed


class Rendezvous(NamedTuple):
    """Where a group's stages or a decode worker's ranks meet. Any process that reaches the store can use
    it, so the secret travels by Ray."""

    address: str
    port: int
    secret: bytes


class RequestFailed(Exception):
    """One request cannot go on at a stage; the stage and its other requests can."""


class OtherMemory(DecodeFailed):
    """A stage maps the memory of another decode worker than it was sent to."""


class HandoffFailed(RequestFailed, PrefillFailed, DecodeFailed): ...


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """A request's first command on every stage.

    pages: there. serial: never used again, unlike the id; `abandon` names it. start: tokens whose K/V the
    decode worker has. attempt: as in `PrefillJob`.
    """

    request_id: str
    pages: tuple[int, ...]
    prompt_tokens: int
    method: MethodSpec
    decode_worker: str
    serial: int = 0
    start: int = 0
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class ChunkCommand:
    """Run tokens start .. start+tokens-1. token_ids: uint32, for the first stage only."""

    request_id: str
    start: int
    tokens: int
    last: bool
    wants_logits: bool
    token_ids: bytes = field(repr=False, default=b"")
    trace: str = ""


@dataclass(frozen=True, kw_only=True)
class ChunkReport:
    """One stage's work on one chunk. phases: seconds within wall, by name (projection, anchors, scoring,
    selection, attention, correction, kv_gather, handoff, activation_wait, activation_send, kv_fetch).
    launched_ahead: seconds from the last launch on a GPU to the chunk's end there; None on a CPU."""

    request_id: str
    stage: int
    start: int
    wall: float
    phases: dict[str, float]
    density: tuple[LayerDensity, ...]
    sampled_share: float
    handoff_bytes: int
    launched_ahead: float | None = None


@dataclass(frozen=True, kw_only=True)
class KVAnnouncement:
    """K/V of layers layer .. layer+layers-1 for tokens start .. start+tokens-1, ready to be read. payload:
    known to the transport's two ends only."""

    request_id: str
    layer: int
    start: int
    tokens: int
    payload: Any = field(repr=False)
    layers: int = 1
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class PageWriter:
    """A stage that writes one attempt's K/V to the decode worker's own pages. home, pid: of its process.
    memory: that it maps (`PagedKVCache.memory`)."""

    request_id: str
    attempt: int
    home: str
    pid: int
    memory: str


@dataclass(frozen=True, kw_only=True)
class KVRange:
    """K/V of one layer for tokens start .. start+tokens-1 that a stage wants back."""

    request_id: str
    layer: int
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class HostKV:
    """A KVRange's host arrays k and v, [tokens, kv_heads, head_dim], and in 8 bits their scales."""

    k: Any = field(repr=False)
    v: Any = field(repr=False)
    scales: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class FirstLogits:
    """Logits of the prompt's last position, float32 [V] (numpy)."""

    request_id: str
    logits: Any = field(repr=False)
    attempt: int = 0
