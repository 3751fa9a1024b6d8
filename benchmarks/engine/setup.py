"""The configuration of the measured service, and the GPU memory that it needs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from deltafront.kernels.constants import BLOCK, PAGE_TOKENS
from deltafront.service.cli.size import GIB, RESERVE_GIB, rank_bytes, stage_bytes
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.settings import DecodeConfig, KVDtype

ANSWER_ROOM = 1024
"""Tokens that each prompt gets in addition to its length, for extensions and answers."""
_BESIDE = 0.6, 0.4
"""Shares of a GPU for a stage and a decode worker on the same GPU. Two stages never fit one GPU."""


@dataclass(frozen=True)
class Setup:
    """The configuration of one measured service.

    Attributes:
        tokens: Tokens of the longest prompt.
        sessions: Tokens of each session to decode from.
        ranks: GPUs of the decode worker.
        decode_gpu: `own`: a GPU without a stage. `last`: a stage's GPU. `mapped`: the only stage's GPU, with
            one copy of weights and KV cache. `none`: the CPU, which is enough for first tokens.
        more: Further keys to set, `section.key` → value.
    """

    model: Path
    shape: ModelConfig
    tokens: int
    sessions: Sequence[int] = ()
    stages: int = 1
    groups: int = 1
    decode_gpu: Literal["own", "last", "mapped", "none"] = "own"
    chunk_tokens: int = 16_384
    device: Literal["cuda", "cpu"] = "cuda"
    kernel_cache: Path | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    kv_dtype: KVDtype | None = None

    @property
    def gpus(self) -> int:
        """The number of GPUs of the prefill groups."""
        return self.groups * self.stages

    @property
    def prefill_tokens(self) -> int:
        return _whole(self.tokens, self.chunk_tokens)

    @property
    def decode_tokens(self) -> int:
        """Tokens of KV cache for all concurrent requests and their answers."""
        at_once = max(self.groups * (self.tokens + ANSWER_ROOM), sum(self.sessions) + 8 * ANSWER_ROOM)
        return _whole(at_once, PAGE_TOKENS)

    def content(self) -> dict[str, Any]:
        """Return the content of the service's configuration file."""
        on_gpu = self.device == "cuda"
        decodes_on_gpu = on_gpu and self.decode_gpu != "none"
        mapped = self.decode_gpu == "mapped"
        beside = _BESIDE if mapped or self.decode_gpu == "last" else (1, int(decodes_on_gpu))
        transport = "mapped" if mapped else "cuda_ipc" if decodes_on_gpu else "object_store"
        if self.decode_gpu == "last" and self.ranks > 1:
            beside = 1, 0  # so that rank i takes GPU i of the host
        stage, decode = beside if on_gpu else (0, 0)
        cpus = 1 if on_gpu else 0.1
        threads = 4 if on_gpu else 1
        content: dict[str, Any] = {
            "model": {"path": str(self.model), "dtype": "bfloat16" if on_gpu else "float32"},
            "prefill": {
                "groups": self.groups,
                "stages": self.stages,
                "chunk_tokens": self.chunk_tokens,
                "cache_tokens": self.decode_tokens if mapped else self.prefill_tokens,
                "device": self.device,
                "threads": threads,
                "cpus_per_stage": cpus,
                "gpus_per_stage": stage,
                "method_modules": [f"{__package__}.peers"],
                "method_options": {"dpxa": {"share": 0.05}},  # warm-up compiles the rule that is measured
                "warm_up": ["dense", "dpxa", "dpxa+delta"],
            },
            "decode": {
                "tensor_parallel": self.ranks,
                "cache_tokens": self.decode_tokens,
                "append_chunk_tokens": 512,
                "page_selection": "full",
                "page_budget": 256,
                "recompute_blocks": 0,  # a request that recomputes blocks gives their number
                "kv_dtype": self.kv_dtype,
                "delta_layers": delta_layers(self.shape.layers, self.shape.exact_layers),
                "device": "cuda" if decodes_on_gpu else "cpu",
                "threads": threads,
                "cpus": cpus,
                "gpus": decode,
                "warm_up": True,
            },
            "handoff": {"transport": transport},
            "door": {
                "replicas": 1,
                "prefix_reuse": False,
                "metrics_host": "127.0.0.1",
                "default_method": "dpxa",
            },
        }
        if self.kernel_cache is not None:
            for section in ("prefill", "decode"):
                content[section]["kernel_cache"] = str(self.kernel_cache.resolve())
        for name, value in self.more.items():
            section, _, key = name.partition(".")
            content.setdefault(section, {})[key] = value
        return content

    def write(self, folder: Path) -> Path:
        path = folder / "engine.yaml"
        path.write_text(yaml.safe_dump(self.content()))
        return path

    def fullest_gib(self, reserve_gib: float = RESERVE_GIB) -> float:
        """Return the GiB needed on the fullest GPU: weights, KV cache, and a reserve for each process."""
        kind = self.more.get("model.quantisation")
        shape = replace(self.shape, rolling_buffer=bool(self.more.get("model.rolling_buffer")))
        slots = self.more.get("decode.state_slots", DecodeConfig.state_slots)
        stage = stage_bytes(shape, self.stages, self.prefill_tokens, "bfloat16", kind, self.kv_dtype)
        decode = rank_bytes(shape, self.ranks, self.decode_tokens, "bfloat16", kind, self.kv_dtype, slots)
        decode = 0 if self.decode_gpu == "none" else decode
        shared = self.decode_gpu in ("last", "mapped")
        most = stage + decode if self.decode_gpu == "last" else max(stage, decode)
        return most / GIB + reserve_gib * (1 + shared)


def delta_layers(layers: int, exact: Collection[int] = ()) -> list[int]:
    """Choose up to four Δ-layers, evenly spaced after the first two layers, without windows or linear
    attention (`exact`)."""
    free = [layer for layer in range(2, layers) if layer not in exact]
    return sorted({free[(2 * part + 1) * len(free) // 8] for part in range(4)})


_FORCED = 6
"""Blocks of sink and window that `dpxa` keeps in every row, even if its share is smaller."""


def dpxa_share(density: float, tokens: int) -> float:
    """Return the option `share` that gives a prompt this density over all causal tiles. Raises ValueError if
    sink and window alone exceed it."""
    rows = -(-tokens // BLOCK)
    causal = rows * (rows + 1) / 2

    def mean(share: float) -> float:
        return sum(max(min(row, _FORCED), math.ceil(share * row)) for row in range(1, rows + 1)) / causal

    if mean(0.0) > density:
        raise ValueError(f"density {density} at {tokens} tokens: sink and window alone are {mean(0.0):.3f}")
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if mean(middle) >= density else (middle, high)
    return high


def _whole(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit
