"""Cuts a prompt into chunks. Fewer chunks lower fixed costs; shorter chunks lower pipeline bubbles at the
first and last chunk. Costs are in multiply-adds (`ModelWork`). Pure, and without torch.

Equal stages form a proportionate flow shop: the total is the sum of the chunks' times plus (stages - 1) times
the longest, so chunks should take equally long. Attention makes later tokens cost more, so later chunks have
fewer tokens. If later stages are faster, chunks should become shorter, so that the last wait is short. If
they are slower, chunks should become longer, so that the last stage begins sooner.
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
"""Ratios that are tried of a chunk's time to the one before it, if stages differ."""
_MANY = 1000
"""No growth is tried with more chunks: the last is too short to matter, and a power of growth may
overflow."""

_FLOPS, _FLOPS_8_BITS = 660e12, 1210e12
"""Operations per second that GEMMs of an 8B model reach on an H200, overheads included. A multiply-add counts
as two."""
_CHUNK_S, _LAYER_S = 3e-3, 100e-6
"""A chunk's fixed cost on a stage, and in each layer: launches, ends of kernels, activations. Other numbers
of chunks than these give make no difference (docs/log/2026-11-25.md at 4fe709c6)."""
_EVEN = 4 * BLOCK
"""Longer chunks are multiples of it: 32 heads' blocks fill 132 multiprocessors, so 1,152 tokens take as long
as 1,536."""
_SPARSE = 0.087
"""A sparse method's share of dense attention's time, scoring included (131,072 tokens, density 0.055)."""


@dataclass(frozen=True)
class StageCost:
    """A chunk's cost on one stage. The unit is the cost of one token's GEMMs on the average stage.

    Attributes:
        per_pair: Cost per causal pair of query and key.
    """

    per_token: float
    per_pair: float
    per_chunk: float

    def of(self, start: int, tokens: int) -> float:
        """Return the cost of tokens start .. start+tokens-1."""
        return self.per_token * tokens + self.per_pair * tokens * (start + (tokens + 1) / 2) + self.per_chunk


@dataclass(frozen=True)
class ChunkCost:
    """A chunk's cost on each stage.

    Attributes:
        even: Chunks of at least this many tokens are rounded to multiples of it.
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
        """Return the tokens of a chunk from `start` on that costs about `limit`, without `per_chunk`, on
        the average stage: full blocks, at least one.
        """
        mean = self.mean
        slope = mean.per_token + mean.per_pair * (start + 0.5)
        tokens = 2 * limit / (slope + math.sqrt(slope * slope + 2 * mean.per_pair * limit))
        step = BLOCK if tokens < self.even else self.even
        return max(BLOCK, round(tokens / step) * step)


@dataclass(frozen=True)
class StageWork:
    """A stage's share of a model, in multiply-adds.

    Attributes:
        per_pair: Multiply-adds per pair of query and key, in layers without windows.
        halves: Number of attention and MLP halves.
    """

    per_token: int
    per_pair: int
    halves: int


@dataclass(frozen=True)
class ModelWork:
    """A model's work by stage. `quantised` says whether its GEMMs are in 8 bits."""

    stages: tuple[StageWork, ...]
    quantised: bool = False

    @classmethod
    def of(cls, model: ModelConfig, stages: int, quantised: bool) -> ModelWork:
        """Compute the work of each share of `ModelConfig.split`. The last layer computes only keys and
        values.
        """
        shares, works = model.split(stages), []
        for share in shares:
            last = share is shares[-1]
            attentions, mlps = len(share.layers) - last, share.mlps[: len(share.mlps) - last]
            per_token = attentions * model.attention_matrices + last * model.qkv_matrices
            per_token += sum(count * kind.mlp_macs for kind, count in model.kinds(mlps))
            windows = [model.windows[n] for n in share.layers[:attentions] if n in model.windows]
            per_token += sum(windows) * model.macs_per_pair
            per_pair = (attentions - len(windows)) * model.macs_per_pair
            works.append(StageWork(per_token, per_pair, attentions + len(mlps) + last))
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


class ChunkSizes:
    """Chooses chunk sizes. Without `work`, as on a CPU, all chunks have `largest` tokens."""

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
    """Return the sizes of the chunks of tokens start .. tokens-1, at most `largest` each. All but the last
    are multiples of a block.

    By this cost model their time is within 1% of the shortest cut's if stages are equal and within 3% if they
    are not. With `even` above a block it is within 4% of the shortest cut into such multiples.
    """
    even = even_chunks(start, tokens, largest)
    if len(cost.stages) == 1 or len(even) == 0:
        return even
    counts = _counts(start, tokens, len(even), cost)
    growths = (1.0,) if counts[-1] > _MANY else _GROWTHS
    cuts = (_cut(start, tokens, n, largest, growth, cost) for growth, n in product(growths, counts))
    return min((even, *cuts), key=lambda sizes: takes(sizes, start, cost))


def takes(sizes: Sequence[int], start: int, cost: ChunkCost) -> float:
    """Return the time from the first chunk's start to the last chunk's end, in `StageCost`'s unit.

    A stage begins a chunk when it has finished its previous chunk and the previous stage has finished this
    one.
    """
    free = [0.0] * len(cost.stages)
    for size in sizes:
        arrived = 0.0
        for number, stage in enumerate(cost.stages):
            arrived = free[number] = max(free[number], arrived) + stage.of(start, size)
        start += size
    return free[-1]


def _counts(start: int, tokens: int, fewest: int, cost: ChunkCost) -> list[int]:
    """Return the numbers of chunks to try: around the optimum of a prompt that could be cut anywhere, where
    the time is flat."""
    bare = cost.of(start, tokens - start) - cost.mean.per_chunk
    middle = math.sqrt((len(cost.stages) - 1) * bare / max(cost.mean.per_chunk, 1e-9))
    limit = -(-(tokens - start) // BLOCK)
    low, high = (min(max(fewest, round(middle * factor)), limit) for factor in (0.5, 2.0))
    tried = {round(low + (high - low) * n / (_TRIES - 1)) for n in range(_TRIES)}
    return sorted(tried)


def _cut(
    start: int, tokens: int, count: int, largest: int, growth: float, cost: ChunkCost
) -> tuple[int, ...]:
    """Cut into about `count` chunks, each of which costs `growth` times the one before it."""
    parts = [growth**n for n in range(count)]
    sizes: list[int] = []
    for part, rest in zip(parts, [*accumulate(parts[::-1])][::-1], strict=True):
        if start < tokens:
            left = cost.of(start, tokens - start) - cost.mean.per_chunk
            size = cost.tokens_for(start, left * part / rest)
            sizes.append(min(size, largest, tokens - start))
            start += sizes[-1]
    return (*sizes, *even_chunks(start, tokens, largest))
