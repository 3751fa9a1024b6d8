"""Messages inside a prefill group, and from its stages to decode workers."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deltafront.kernels.methods import MethodSpec
from deltafront.workers.messages.events import LayerDensity
from deltafront.workers.messages.requests import DecodeFailed, PrefillFailed


class Rendezvous(NamedTuple):
    """The address at which a group's stages or a decode worker's ranks meet.

    The store admits every process that has the secret, so the secret travels only by Ray.
    """

    address: str
    port: int
    secret: bytes


class RequestFailed(Exception):
    """One request has failed at a stage. The stage and its other requests continue."""


class OtherMemory(DecodeFailed):
    """A stage got a request for one decode worker, but maps the memory of another."""


class HandoffFailed(RequestFailed, PrefillFailed, DecodeFailed): ...


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """The first command of a request, sent to every stage.

    Attributes:
        pages: The request's pages on every stage.
        serial: A unique number, by which `abandon` names the request. A request id may be used again.
        start: Number of first tokens whose KV the decode worker already has.
        attempt: As in `PrefillJob`.
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
    """Prefill tokens start .. start+tokens-1. `token_ids` are uint32 and sent to the first stage only."""

    request_id: str
    start: int
    tokens: int
    last: bool
    wants_logits: bool
    token_ids: bytes = field(repr=False, default=b"")
    trace: str = ""


@dataclass(frozen=True, kw_only=True)
class ChunkReport:
    """One stage's work on one chunk.

    Attributes:
        phases: Seconds of `wall` by name: projection, anchors, scoring, selection, attention, correction,
            kv_gather, handoff, activation_wait, activation_send, kv_fetch.
        launched_ahead: Seconds from the host's last launch to the chunk's end on the GPU; None on a CPU.
    """

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
    """KV of layers layer .. layer+layers-1 for tokens start .. start+tokens-1 can be read.

    Only the two ends of the transport know the type of `payload`.
    """

    request_id: str
    layer: int
    start: int
    tokens: int
    payload: Any = field(repr=False)
    layers: int = 1
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class PageWriter:
    """A stage that writes one attempt's KV into the decode worker's own pages.

    Attributes:
        home: Its host, from `peer_memory.home`.
        memory: Name of the memory that it maps (`PagedKVCache.memory`).
    """

    request_id: str
    attempt: int
    home: str
    pid: int
    memory: str


@dataclass(frozen=True, kw_only=True)
class KVRange:
    """The KV of one layer for tokens start .. start+tokens-1, which a resuming stage fetches."""

    request_id: str
    layer: int
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class HostKV:
    """The KV of a KVRange as host arrays k and v, [tokens, kv_heads, head_dim], in 8 bits with their
    scales."""

    k: Any = field(repr=False)
    v: Any = field(repr=False)
    scales: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class FirstLogits:
    """Logits of the prompt's last position, float32 [V] (numpy)."""

    request_id: str
    logits: Any = field(repr=False)
    attempt: int = 0
