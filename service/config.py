"""The whole configuration: read once, checked at start, frozen, passed on by constructor.

A file that names an unknown key, or values that contradict each other, stops the start with a message that
names the file, the key and what to do.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..workers.messages import BLOCK, PAGE_TOKENS, MethodError, method_spec, reads_whole_prompts
from ..workers.settings import DecodeConfig, ModelSpec, PrefillConfig

_CHUNK = BLOCK
"""Chunks are multiples of this many tokens (the attention tile)."""
_PAGE = PAGE_TOKENS

Port = Annotated[int, Field(ge=1, le=65_535)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names file and key."""


def _method_trouble(name: str) -> str:
    """Why the service cannot prefill with this method; empty if it can."""
    try:
        spec = method_spec(name)
    except MethodError as error:
        return str(error)
    return f"{name} reads whole prompts only, not chunks" if reads_whole_prompts(spec.name) else ""


class DoorConfig(BaseModel):
    """The front door: ports, limits, patience."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: Count = 1
    cpus: Annotated[float, Field(ge=0)] = 0.1
    max_requests: Count = 256
    """Requests that one replica works on at once; more get RESOURCE_EXHAUSTED."""
    grpc_port: Port = 9000
    http_port: Port = 8000
    metrics_port: Port = 9464
    metrics_host: str = "0.0.0.0"
    max_message_bytes: Annotated[int, Field(ge=1 << 22, le=(1 << 31) - 1)] = 64 << 20
    tokens_file: Path | None = None
    """Bearer tokens, one a line. None: everybody may call, and sessions belong to nobody."""
    model_name: str = ""
    """Shown by GetServerInfo; empty: model.path."""
    default_method: str = "dpxa"
    default_max_tokens: Count = 256
    default_session_ttl_s: Positive = 600.0
    max_waiting: Count = 64
    """Prompts that may wait in one prefill group before more are refused."""
    replays: Annotated[int, Field(ge=0, le=10)] = 2
    """How often a request is tried again after a worker died under it."""
    worker_wait_s: Positive = 60.0
    """How long a request waits for a worker when there is none (one is being rebuilt)."""
    refresh_s: Positive = 1.0
    renew_s: Positive = 5.0

    @model_validator(mode="after")
    def _method(self) -> DoorConfig:
        trouble = _method_trouble(self.default_method)
        if trouble:
            raise ValueError(f"default_method: {trouble}")
        return self


class ServiceConfig(BaseModel):
    """Everything. model, prefill and decode are passed to the workers as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelSpec
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    door: DoorConfig = DoorConfig()

    @model_validator(mode="after")
    def _consistent(self) -> ServiceConfig:
        problems = [*_prefill_problems(self.prefill), *_decode_problems(self.decode)]
        if self.door.default_session_ttl_s > self.decode.max_session_ttl_s:
            problems.append("door.default_session_ttl_s: must not exceed decode.max_session_ttl_s")
        if self.door.renew_s * 2 > self.decode.stream_lease_s:
            problems.append("door.renew_s: must be at most half of decode.stream_lease_s")
        ports = [self.door.grpc_port, self.door.http_port, self.door.metrics_port]
        if len(set(ports)) < len(ports):
            problems.append("door: grpc_port, http_port and metrics_port must differ")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def with_model(self, **changes: Any) -> ServiceConfig:
        """The same configuration for another model path, adapter or dtype."""
        return self.model_copy(update={"model": dataclasses.replace(self.model, **changes)})


def parse(content: Mapping[str, Any], source: str = "configuration") -> ServiceConfig:
    """Check plain data (from YAML, or Serve's `args`). Raises ConfigError."""
    try:
        return ServiceConfig.model_validate(content)
    except ValidationError as error:
        lines = [_problem(one["loc"], one["type"], one["msg"], one["input"]) for one in error.errors()]
        raise ConfigError("\n".join(f"{source}: {line}" for line in lines)) from None


def load(path: Path) -> ServiceConfig:
    """Read a YAML file. A relative tokens_file is relative to it. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys model, prefill, decode and door")
    config = parse(content, str(path))
    tokens = config.door.tokens_file
    if tokens is None or tokens.is_absolute():
        return config
    door = config.door.model_copy(update={"tokens_file": path.parent.resolve() / tokens})
    return config.model_copy(update={"door": door})


def _problem(loc: tuple[int | str, ...], kind: str, message: str, value: Any) -> str:
    where = ".".join(str(part) for part in loc)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        near = difflib.get_close_matches(str(loc[-1]), _keys(loc[:-1]), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_keys(loc[:-1]))}"
        return f"unknown key {where!r}; {hint}"
    if kind in ("missing", "missing_argument"):
        return f"key {where!r} is missing"
    text = message.removeprefix("Value error, ")
    return (
        text
        if not where or text.startswith(where)
        else f"{where} = {value!r}: {text}"
        if kind != ("value_error")
        else f"{where}.{text}"
    )


def _keys(loc: tuple[int | str, ...]) -> list[str]:
    sections: Mapping[str, list[str]] = {
        "model": [field.name for field in dataclasses.fields(ModelSpec)],
        "prefill": [field.name for field in dataclasses.fields(PrefillConfig)],
        "decode": [field.name for field in dataclasses.fields(DecodeConfig)],
        "door": list(DoorConfig.model_fields),
    }
    return sections.get(str(loc[0]), []) if loc else list(sections)


def _prefill_problems(prefill: PrefillConfig) -> list[str]:
    checks = (
        (prefill.groups >= 1, "groups: at least 1"),
        (prefill.stages >= 1, "stages: at least 1"),
        (
            prefill.chunk_tokens >= _CHUNK and prefill.chunk_tokens % _CHUNK == 0,
            f"chunk_tokens = {prefill.chunk_tokens}: must be a multiple of {_CHUNK}",
        ),
        (
            prefill.cache_tokens >= prefill.chunk_tokens and prefill.cache_tokens % _PAGE == 0,
            f"cache_tokens = {prefill.cache_tokens}: a multiple of {_PAGE}, and at least one chunk",
        ),
        (prefill.threads >= 1, "threads: at least 1"),
        (
            prefill.cpus_per_stage >= 0 and prefill.gpus_per_stage >= 0,
            "cpus_per_stage, gpus_per_stage: not negative",
        ),
        (prefill.ageing_tokens_per_second >= 0, "ageing_tokens_per_second: not negative"),
        *((not trouble, f"warm_up: {trouble}") for trouble in map(_method_trouble, prefill.warm_up)),
    )
    return [f"prefill.{text}" for good, text in checks if not good]


def _decode_problems(decode: DecodeConfig) -> list[str]:
    both = set(decode.full_layers) & set(decode.delta_layers)
    checks = (
        (decode.workers >= 1, "workers: at least 1"),
        (
            decode.cache_tokens >= _PAGE and decode.cache_tokens % _PAGE == 0,
            f"cache_tokens = {decode.cache_tokens}: must be a positive multiple of {_PAGE}",
        ),
        (not decode.warm_up or decode.cache_tokens >= 256, "warm_up: needs cache_tokens of at least 256"),
        (decode.max_batch >= 1, "max_batch: at least 1"),
        (decode.append_chunk_tokens >= 1, "append_chunk_tokens: at least 1"),
        (
            decode.page_selection in ("delta", "full"),
            f"page_selection = {decode.page_selection!r}: delta or full",
        ),
        (
            decode.page_selection != "delta" or bool(decode.delta_layers),
            "delta_layers: empty, so page_selection must be full (calibrate layers for delta)",
        ),
        (1 <= decode.recency <= decode.page_budget, "recency: between 1 and page_budget"),
        (not both, f"full_layers and delta_layers share {sorted(both)}"),
        (decode.max_session_ttl_s > 0, "max_session_ttl_s: positive"),
        (decode.stream_lease_s > 0, "stream_lease_s: positive"),
        (decode.threads >= 1, "threads: at least 1"),
        (decode.cpus >= 0 and decode.gpus >= 0, "cpus, gpus: not negative"),
    )
    return [f"decode.{text}" for good, text in checks if not good]
