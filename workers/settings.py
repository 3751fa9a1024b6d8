"""What workers are configured with: built once by the service, passed on by constructor.

Frozen and free of torch. The classes also are sections of the configuration file (`service/config.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

_STRICT: dict[str, Any] = {"extra": "forbid"}
"""pydantic's configuration, when it reads the file."""


@dataclass(frozen=True)
class ModelSpec:
    """Which model, and what to change about it.

    path: a model directory, the embedded default's name, a .gguf file or a hub id. adapter: a PEFT LoRA
    directory merged at load. rope_theta, max_position_embeddings: replace the model's own values.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    path: str
    adapter: str | None = None
    dtype: str = "bfloat16"
    rope_theta: float | None = None
    max_position_embeddings: int | None = None

    @property
    def overrides(self) -> dict[str, float | int]:
        pairs = {"rope_theta": self.rope_theta, "max_position_embeddings": self.max_position_embeddings}
        return {key: value for key, value in pairs.items() if value is not None}


@dataclass(frozen=True)
class PrefillConfig:
    """A prefill group. cache_tokens: K/V room of each stage, in tokens, shared by its requests."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    groups: int = 1
    stages: int = 2
    chunk_tokens: int = 512
    cache_tokens: int = 32_768
    device: str = "cpu"
    threads: int = 1
    cpus_per_stage: float = 0.5
    gpus_per_stage: float = 0.0
    ageing_tokens_per_second: float = 256.0
    """A waiting request counts as this many tokens shorter for each second it has waited."""
    stream_lease_s: float = 60.0
    """A request whose door has not renewed it for this long is cancelled."""
    warm_up: tuple[str, ...] = ()
    """Methods that every stage runs once before it takes requests: a GPU compiles at first use."""


@dataclass(frozen=True)
class DecodeConfig:
    """A decode worker and its DELTA page selection (DELTA, Algorithm 2).

    page_selection: `delta` or `full`, the default of requests that name none. page_budget: K, pages attended
    per sparse layer. recency: L, last pages always among them. full_layers: dense, unscored. delta_layers:
    dense and scoring; empty means none are calibrated and `delta` is refused.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    workers: int = 1
    cache_tokens: int = 65_536
    max_batch: int = 16
    append_chunk_tokens: int = 256
    page_selection: str = "delta"
    page_budget: int = 64
    recency: int = 8
    full_layers: tuple[int, ...] = (0, 1)
    delta_layers: tuple[int, ...] = ()
    max_session_ttl_s: float = 3600.0
    stream_lease_s: float = 60.0
    """A running request whose door has not renewed it for this long is cancelled."""
    device: str = "cpu"
    threads: int = 1
    cpus: float = 0.5
    gpus: float = 0.0
    warm_up: bool = False
    """Whether a worker decodes made-up requests before it takes real ones: a GPU compiles at first use."""


@dataclass(frozen=True)
class HandoffConfig:
    """How K/V gets from prefill stages to decode workers. transport: `object_store`, through Ray's shared
    memory, or `in_process`, for stages and decode worker in one process.

    max_unanswered_bytes: a stage waits once it has handed over so much that no decode worker has taken.
    ack_timeout_s: a decode worker that takes longer than this to take what it was handed has failed.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    transport: str = "object_store"
    max_unanswered_bytes: int = 256 << 20
    ack_timeout_s: float = 60.0
