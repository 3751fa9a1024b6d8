"""The cost of a chunk on each stage of a group of GPUs, in multiply-adds. Pure, and free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from ....kernels.constants import BLOCK
from ...messages.methods import MethodSpec
from ...model.directory.model_config import ModelConfig

_FLOPS, _FLOPS_8_BITS = 660e12, 1210e12
"""Operations a second that products of 8B shapes reach on an H200, overheads included. A multiply-add counts
as two."""
_CHUNK_S, _LAYER_S = 3e-3, 100e-6
"""A chunk's fixed cost on a stage, and in each layer: launches, ends of kernels, activations. More or fewer
chunks than these give make no difference (docs/log/2026-11-25.md)."""
_EVEN = 4 * BLOCK
"""Longer chunks are multiples of it: 32 heads' blocks fill 132 multiprocessors, so 1,152 tokens take as long
as 1,536."""
_SPARSE = 0.087
"""A sparse method's share of dense attention's time, scoring included (131,072 tokens, density 0.055)."""


@dataclass(frozen=True)
class StageCost:
    """A chunk's cost on one stage. The unit is a token's matrix products on a mean stage. per_pair: for each
    query and each key up to it."""

    per_token: float
    per_pair: float
    per_chunk: float

    def of(self, start: int, tokens: int) -> float:
        """The cost of tokens start .. start+tokens-1."""
        return self.per_token * tokens + self.per_pair * tokens * (start + (tokens + 1) / 2) + self.per_chunk


@dataclass(frozen=True)
class ChunkCost:
    """A chunk's cost on each stage. even: chunks of so many tokens or more are multiples of it."""

    stages: tuple[StageCost, ...]
    even: int = BLOCK

    @cached_property
    def mean(self) -> StageCost:
        sides = ("per_token", "per_pair", "per_chunk")
        return StageCost(*(fmean(getattr(stage, side) for stage in self.stages) for side in sides))

    @property
    def alike(self) -> bool:
        return len({*self.stages}) == 1

    def of(self, start: int, tokens: int) -> float:
        """The same on a mean stage."""
        return self.mean.of(start, tokens)

    def fitting(self, start: int, limit: float) -> int:
        """Count the tokens from `start` on of a chunk of cost `limit` on a mean stage; 0 if not one block."""
        mean = self.mean
        room = limit - mean.per_chunk
        if room <= 0:
            return 0
        slope = mean.per_token + mean.per_pair * (start + 0.5)
        tokens = 2 * room / (slope + math.sqrt(slope * slope + 2 * mean.per_pair * room))
        blocks = int(tokens * (1 + 1e-12)) // BLOCK * BLOCK
        return blocks if blocks < self.even else blocks // self.even * self.even


@dataclass(frozen=True)
class StageWork:
    """A stage's share of a model, in multiply-adds. per_pair: for each query and key. halves: how many
    attentions and MLPs."""

    per_token: int
    per_pair: int
    halves: int


@dataclass(frozen=True)
class ModelWork:
    """A model by its stages. quantised: products are of 8 bits."""

    stages: tuple[StageWork, ...]
    quantised: bool = False

    @classmethod
    def of(cls, model: ModelConfig, stages: int, quantised: bool) -> ModelWork:
        """Count what `ModelConfig.split` shares out. The last layer ends with keys and values."""
        shares, works = model.split(stages), []
        for share in shares:
            last = share is shares[-1]
            attentions, mlps = len(share.layers) - last, len(share.mlps) - last
            per_token = attentions * model.attention_matrices + mlps * model.mlp_matrices
            per_token += last * model.qkv_matrices
            works.append(StageWork(per_token, attentions * model.macs_per_pair, attentions + mlps + last))
        return cls(tuple(works), quantised)

    def chunk_cost(self, method: MethodSpec) -> ChunkCost:
        rate = _FLOPS_8_BITS if self.quantised else _FLOPS
        mean = fmean(stage.per_token for stage in self.stages)
        token_s = 2 * mean / rate
        dense = method.name.partition("+")[0] == "dense"
        per_pair = (1.0 if dense else _SPARSE) * rate / _FLOPS / mean
        stages = (
            StageCost(
                per_token=stage.per_token / mean,
                per_pair=per_pair * stage.per_pair,
                per_chunk=(_CHUNK_S + stage.halves / 2 * _LAYER_S) / token_s,
            )
            for stage in self.stages
        )
        return ChunkCost(tuple(stages), _EVEN)
