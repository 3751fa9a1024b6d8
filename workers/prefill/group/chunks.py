"""Cuts a prompt into chunks. Few chunks lower fixed costs; short chunks lower the pipeline bubbles at the
beginning and end. Costs are multiply-adds (`ModelWork`). Pure, imports no torch.

With equal stages the total time is the sum of the chunks' times plus (stages - 1) times the longest chunk's
(a proportionate flow shop), so all chunks should take equally long. Attention makes later tokens more
expensive, so later chunks get fewer tokens. If later stages are faster, chunks should become shorter: the
last stage then waits less. If later stages are slower, chunks should become longer: the last stage then
starts earlier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, product
from statistics import fmean

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.methods import MethodSpec
from deltafront.workers.model.directory.model_config import ModelConfig

_CACHE_SIZE = 64
_TRIES = 8
_GROWTHS = (0.9, 0.95, 0.98, 1.0, 1.03)
"""Ratios of a chunk's time to the previous chunk's time. All are tried if stages differ."""
_MANY = 1000
"""With more chunks than this, only equal times are tried, because powers of the ratios may overflow."""

_FLOPS, _FLOPS_8_BITS = 660e12, 1210e12
"""FLOP/s that the GEMMs of an 8B model reach on an H200 in 16 and in 8 bits, overheads included. A
multiply-add is two FLOPs."""
_CHUNK_S, _LAYER_S = 3e-3, 100e-6
"""Fixed seconds of a chunk on a stage, and in each layer, for launches and activations. Small changes of
these values make no measurable difference (docs/log/2026-11-25.md at 4fe709c6)."""
_EVEN = 4 * BLOCK
"""Longer chunks are rounded to multiples of this. With 32 heads on 132 multiprocessors, 1,152 tokens take as
long as 1,536."""
_BATCH_TOKENS = 4096
"""A stage's host takes longer to launch a batch of fewer tokens of an 8B model than an H200 to compute it."""
_SPARSE = 0.087
"""Time of a sparse method, scoring included, divided by that of dense attention (131,072 tokens, density
0.055)."""


@dataclass(frozen=True)
class StageCost:
    """Coefficients of a chunk's cost on one stage. The unit is one token's GEMMs on the average stage.

    Attributes:
        per_pair: Cost of one causal pair of query and key.
        per_chunk: Fixed cost of a chunk.
    """

    per_token: float
    per_pair: float
    per_chunk: float

    def of(self, start: int, tokens: int) -> float:
        """Return the cost of tokens start .. start+tokens-1."""
        return self.per_token * tokens + self.per_pair * tokens * (start + (tokens + 1) / 2) + self.per_chunk


@dataclass(frozen=True)
class ChunkCost:
    """Coefficients of a chunk's cost on every stage.

    Attributes:
        even: Chunks of at least `even` tokens are rounded to multiples of `even`.
    """

    stages: tuple[StageCost, ...]
    even: int = BLOCK

    @cached_property
    def mean(self) -> StageCost:
        sides = ("per_token", "per_pair", "per_chunk")
        return StageCost(*(fmean(getattr(stage, side) for stage in self.stages) for side in sides))

    def of(self, start: int, tokens: int) -> float:
        """Return the cost of tokens start .. start+tokens-1 on the average stage."""
        return self.mean.of(start, tokens)

    def tokens_for(self, start: int, limit: float) -> int:
        """Return the size of a chunk at token `start` that costs about `limit` on the average stage.

        The cost leaves out `per_chunk`. The size is a multiple of BLOCK and at least BLOCK.
        """
        mean = self.mean
        slope = mean.per_token + mean.per_pair * (start + 0.5)
        tokens = 2 * limit / (slope + math.sqrt(slope * slope + 2 * mean.per_pair * limit))
        step = BLOCK if tokens < self.even else self.even
        return max(BLOCK, round(tokens / step) * step)


@dataclass(frozen=True)
class StageWork:
    """The work of a stage's layers.

    Attributes:
        per_token: Multiply-adds per token, including attention in layers with a sliding window.
        per_pair: Multiply-adds per pair of query and key, in layers without a sliding window.
        halves: Number of sublayers: attention and MLP count one each, so a whole layer counts two.
    """

    per_token: int
    per_pair: int
    halves: int


@dataclass(frozen=True)
class ModelWork:
    """The work of each stage of a model.

    Attributes:
        quantised: GEMMs run in 8 bits.
        batch_tokens: Chunks of several prompts run as one batch of at most this many tokens in all; 0: each
            runs alone.
    """

    stages: tuple[StageWork, ...]
    quantised: bool = False
    batch_tokens: int = 0

    @classmethod
    def of(cls, model: ModelConfig, stages: int, quantised: bool) -> ModelWork:
        """Compute the work of each stage's layers (`ModelConfig.split`). The model's last layer counts only
        with its QKV projection, since prefill needs the rest only for the last tokens, unless its attention
        is linear."""
        shares, works = model.split(stages), []
        for share in shares:
            last = share is shares[-1]
            last &= model.layers - 1 not in model.linear_layers
            attentions, mlps = share.layers[: len(share.layers) - last], share.mlps[: len(share.mlps) - last]
            per_token = last * model.qkv_matrices
            per_token += sum(count * kind.attention_macs for kind, count in model.kinds(attentions))
            per_token += sum(count * kind.mlp_macs for kind, count in model.kinds(mlps))
            windows = [model.windows[n] for n in attentions if n in model.windows]
            per_token += sum(windows) * model.macs_per_pair
            everywhere = len(model.attention_layers(attentions)) - len(windows)
            per_pair = everywhere * model.macs_per_pair
            works.append(StageWork(per_token, per_pair, len(attentions) + len(mlps) + last))
        return cls(tuple(works), quantised, 0 if model.state_layers else _BATCH_TOKENS)

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


class ChunkSizes:
    """Chooses chunk sizes. Without `work` (on a CPU) all chunks but the last have `largest` tokens."""

    def __init__(self, largest: int, work: ModelWork | None = None) -> None:
        self._largest, self._work = largest, work

    def of(self, method: MethodSpec, start: int, tokens: int) -> tuple[int, ...]:
        """Return the sizes of the chunks for tokens start .. tokens-1."""
        if self._work is None:
            return even_chunks(start, tokens, self._largest)
        return plan_chunks(start, tokens, self._largest, self._work.chunk_cost(method))


def even_chunks(start: int, tokens: int, largest: int) -> tuple[int, ...]:
    full, rest = divmod(tokens - start, largest)
    return (largest,) * full + (rest,) * (rest > 0)


@lru_cache(_CACHE_SIZE)
def plan_chunks(start: int, tokens: int, largest: int, cost: ChunkCost) -> tuple[int, ...]:
    """Return sizes of the chunks for tokens start .. tokens-1, each at most `largest`. All but the last are
    multiples of BLOCK.

    In this cost model, the total time is within 1% of the optimum if stages are equal, else within 3%. If
    `even` exceeds BLOCK, it is within 4% of the best cut into multiples of `even`.
    """
    even = even_chunks(start, tokens, largest)
    if len(cost.stages) == 1 or len(even) == 0:
        return even
    counts = _counts(start, tokens, len(even), cost)
    growths = (1.0,) if counts[-1] > _MANY else _GROWTHS
    cuts = (_cut(start, tokens, n, largest, growth, cost) for growth, n in product(growths, counts))
    return min((even, *cuts), key=lambda sizes: takes(sizes, start, cost))


def takes(sizes: Sequence[int], start: int, cost: ChunkCost) -> float:
    """Simulate the pipeline. Returns the time until the last stage ends, in `StageCost`'s unit.

    A stage starts a chunk when it has finished its previous chunk and the previous stage has finished this
    chunk.
    """
    free = [0.0] * len(cost.stages)
    for size in sizes:
        arrived = 0.0
        for number, stage in enumerate(cost.stages):
            arrived = free[number] = max(free[number], arrived) + stage.of(start, size)
        start += size
    return free[-1]


def _counts(start: int, tokens: int, fewest: int, cost: ChunkCost) -> list[int]:
    """Return the numbers of chunks to try. They lie around the optimum for chunks of any length, where the
    time changes little."""
    bare = cost.of(start, tokens - start) - cost.mean.per_chunk
    middle = math.sqrt((len(cost.stages) - 1) * bare / max(cost.mean.per_chunk, 1e-9))
    limit = -(-(tokens - start) // BLOCK)
    low, high = (min(max(fewest, round(middle * factor)), limit) for factor in (0.5, 2.0))
    tried = {round(low + (high - low) * n / (_TRIES - 1)) for n in range(_TRIES)}
    return sorted(tried)


def _cut(
    start: int, tokens: int, count: int, largest: int, growth: float, cost: ChunkCost
) -> tuple[int, ...]:
    """Cut into about `count` chunks. Each chunk costs `growth` times the previous one."""
    parts = [growth**n for n in range(count)]
    sizes: list[int] = []
    for part, rest in zip(parts, [*accumulate(parts[::-1])][::-1], strict=True):
        if start < tokens:
            left = cost.of(start, tokens - start) - cost.mean.per_chunk
            size = cost.tokens_for(start, left * part / rest)
            sizes.append(min(size, largest, tokens - start))
            start += sizes[-1]
    return (*sizes, *even_chunks(start, tokens, largest))
