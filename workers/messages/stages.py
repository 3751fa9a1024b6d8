"""Messages between the controller and the stages of a prefill group, and from stages to decode workers."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deltafront.kernels.methods import MethodSpec
from deltafront.workers.messages.events import LayerDensity
from deltafront.workers.messages.requests import DecodeFailed, PrefillFailed


class Rendezvous(NamedTuple):
    """The address of the store through which a prefill group's stages or a decode worker's ranks connect.

    Only processes with the secret may connect, so the secret is sent only through Ray.
    """

    address: str
    port: int
    secret: bytes


class RequestFailed(Exception):
    """One request has failed on a stage. The stage continues with its other requests."""


class OtherMemory(DecodeFailed):
    """A stage was asked to write KV for one decode worker, but has mapped the memory of another."""


class HandoffFailed(RequestFailed, PrefillFailed, DecodeFailed): ...


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """A request's first command. The controller sends it to every stage.

    Attributes:
        pages: The request's page table, the same on every stage.
        serial: A unique number for `abandon`, because a request id may be used again.
        start: Number of first tokens whose KV the decode worker already has.
        attempt, state_places: As in `PrefillJob`.
    """

    request_id: str
    pages: tuple[int, ...]
    prompt_tokens: int
    method: MethodSpec
    decode_worker: str
    serial: int = 0
    start: int = 0
    attempt: int = 0
    state_places: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChunkCommand:
    """Prefill tokens start .. start+tokens-1. Only the first stage gets `token_ids` (uint32)."""

    request_id: str
    start: int
    tokens: int
    last: bool
    wants_logits: bool
    token_ids: bytes = field(repr=False, default=b"")
    trace: str = ""


@dataclass(frozen=True, kw_only=True)
class ChunkReport:
    """One stage's measurements of one chunk.

    Attributes:
        wall: Seconds from the chunk's start to its end.
        phases: The parts of `wall` in seconds: projection, anchors, scoring, selection, attention,
            correction, kv_gather, handoff, activation_wait, activation_send, kv_fetch.
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
    """Tells a decode worker that it can read the KV of some layers for tokens start .. start+tokens-1.

    Attributes:
        payload: The description by which the transport's reader finds the KV. Its type depends on the
            transport.
        layer, layers: The first layer, and the number of layers.
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
    """A stage that writes a request's KV directly into the decode worker's pages (transport `mapped`).

    Attributes:
        home: The stage's host, from `peer_memory.home`.
        memory: Name of the memory that the stage has mapped (`PagedKVCache.memory`).
        state_places: As in `PrefillJob`.
    """

    request_id: str
    attempt: int
    home: str
    pid: int
    memory: str
    state_places: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OpenedPages:
    """A request's page table, and the slots for its states by number of tokens, in the memory of a decode
    worker that a `PageWriter` has mapped."""

    pages: tuple[int, ...]
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class KVRange:
    """A stage's request for one layer's KV of tokens start .. start+tokens-1, when it resumes a prompt."""

    request_id: str
    layer: int
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class HostKV:
    """The KV of a `KVRange`: host arrays k and v, [tokens, kv_heads, head_dim]. 8-bit KV comes with
    scales."""

    k: Any = field(repr=False)
    v: Any = field(repr=False)
    scales: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class HandedState:
    """The state of one stage's layers after a prompt's first `tokens` tokens, as host arrays
    (`StateCache.write`). No arrays: the stage has written it into the request's slots (transport
    `mapped`)."""

    request_id: str
    tokens: int
    layers: tuple[int, ...]
    arrays: tuple[Any, ...] = field(repr=False, default=())
    attempt: int = 0

    @property
    def bytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays)


@dataclass(frozen=True, kw_only=True)
class FirstLogits:
    """Logits at the prompt's last position: a numpy array, float32 [V]."""

    request_id: str
    logits: Any = field(repr=False)
    attempt: int = 0
