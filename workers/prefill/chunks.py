"""Into which chunks a group cuts a prompt: few enough that what each costs beside its tokens stays small, and
short enough that stages do not wait long for the first or the last. Pure.

Stages that take as long for a chunk as each other (`ModelConfig.split`) take for a prompt the sum of its
chunks' times and (stages - 1) times the longest: a proportionate flow shop, whose best cut has, for its
number of chunks, the least longest one. Attention makes tokens dearer towards the end, and chunks shorter.

Stages seldom are quite alike: some have more of attention and some more of products, so that one may be the
slower with a dense method, another with a sparse one, or at a prompt's beginning and at its end. Where the
later ones take less, chunks that grow shorter are best, since what is waited for at the end is then a short
one; where they take more, chunks that grow longer, since the last stage begins the sooner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from statistics import fmean

from ...kernels.constants import BLOCK
from ..messages.methods import MethodSpec
from ..model.directory.model_config import ModelConfig

_FLOPS, _FLOPS_8_BITS = 660e12, 1210e12
"""Multiply-adds count as two. What products of 8B shapes reach on an H200, with all that is around them."""
_CHUNK_S, _LAYER_S = 3e-3, 100e-6
"""What a chunk costs a stage, and each of its layers, however few its tokens: launches, ends of kernels that
do not fill the device, the way of its activations. Sixteen layers of an 8B shape take 3 ms in all since they
are launched faster, and more or fewer chunks than these give make no difference (docs/log/2026-11-25.md)."""
_EVEN = 4 * BLOCK
"""Longer chunks are multiples of it: 32 heads' blocks then fill 132 multiprocessors. Dense attention of 1,152
tokens takes as long as that of 1,536."""
_SPARSE = 0.087
"""Of dense attention's time, what a sparse method takes, scoring included (131,072 tokens, density 0.055)."""
_REMEMBERED = 64
_TRIES = 8
_HALVINGS = 5
_GROWTHS = (0.88, 0.93, 0.96, 0.98, 1.02, 1.05)
"""Times by which a chunk may take longer than the one before, besides 1."""
_MORE = (1.0, 1.25, 1.6)
"""Times as many chunks as the best of equal times has, that are tried with these."""
_MANY = 1000
"""Of more chunks than that the last one is too short to matter, and a growth to their power may overflow."""


@dataclass(frozen=True)
class StageCost:
    """What a chunk costs one stage, in tokens' worth of the matrix products of a mean one. token: for each
    token. pair: for each query and each key at or before it. fixed: whatever its tokens."""

    token: float
    pair: float
    fixed: float

    def of(self, start: int, tokens: int) -> float:
        """Tokens start .. start+tokens-1."""
        return self.token * tokens + self.pair * tokens * (start + (tokens + 1) / 2) + self.fixed


@dataclass(frozen=True)
class ChunkCost:
    """What a chunk costs each stage. even: what chunks of so many tokens or more are multiples of."""

    stages: tuple[StageCost, ...]
    even: int = BLOCK

    @cached_property
    def mean(self) -> StageCost:
        """Of all stages."""
        sides = ("token", "pair", "fixed")
        return StageCost(*(fmean(getattr(stage, side) for stage in self.stages) for side in sides))

    @property
    def alike(self) -> bool:
        """Whether all stages take as long as each other."""
        return len({*self.stages}) == 1

    def of(self, start: int, tokens: int) -> float:
        """Tokens start .. start+tokens-1, on a mean stage."""
        return self.mean.of(start, tokens)

    def fitting(self, start: int, most: float) -> int:
        """How many tokens from `start` on cost a mean stage `most` together, as a chunk may have them; 0 if
        not one block does."""
        mean = self.mean
        room = most - mean.fixed
        if room <= 0:
            return 0
        slope = mean.token + mean.pair * (start + 0.5)
        tokens = 2 * room / (slope + math.sqrt(slope * slope + 2 * mean.pair * room))
        blocks = int(tokens * (1 + 1e-12)) // BLOCK * BLOCK
        return blocks if blocks < self.even else blocks // self.even * self.even


@dataclass(frozen=True)
class StageWork:
    """A stage's share of a model on GPUs, as far as chunks go. linear, pair: multiply-adds for each token,
    and for each pair of query and key. halves: of layers, attention and MLP."""

    linear: int
    pair: int
    halves: int


@dataclass(frozen=True)
class ModelWork:
    """A model on GPUs, by its stages. quantised: products are of 8 bits."""

    stages: tuple[StageWork, ...]
    quantised: bool = False

    @classmethod
    def of(cls, model: ModelConfig, stages: int, quantised: bool) -> ModelWork:
        """As `ModelConfig.split` shares it out. The model's last layer ends with keys and values."""
        shares, works = model.split(stages), []
        for share in shares:
            last = share is shares[-1]
            attentions, mlps = len(share.layers) - last, len(share.mlps) - last
            linear = attentions * model.attention_matrices + mlps * model.mlp_matrices
            linear += last * model.qkv_matrices
            works.append(StageWork(linear, attentions * model.pair, attentions + mlps + last))
        return cls(tuple(works), quantised)

    def chunk_cost(self, method: MethodSpec) -> ChunkCost:
        rate = _FLOPS_8_BITS if self.quantised else _FLOPS
        mean = fmean(stage.linear for stage in self.stages)
        token_s = 2 * mean / rate
        dense = method.name.partition("+")[0] == "dense"
        pair = (1.0 if dense else _SPARSE) * rate / _FLOPS / mean
        stages = (
            StageCost(
                token=stage.linear / mean,
                pair=pair * stage.pair,
                fixed=(_CHUNK_S + stage.halves / 2 * _LAYER_S) / token_s,
            )
            for stage in self.stages
        )
        return ChunkCost(tuple(stages), _EVEN)


class ChunkSizes:
    """How a group cuts its prompts. work: None where nothing is known of what chunks cost, as on a CPU: then
    all are `largest`."""

    def __init__(self, largest: int, work: ModelWork | None = None) -> None:
        self._largest, self._work = largest, work
        self._planned = lru_cache(_REMEMBERED)(self._plan)

    def of(self, method: MethodSpec, start: int, tokens: int) -> tuple[int, ...]:
        """Sizes of the chunks of tokens start .. tokens-1 of a prompt."""
        if self._work is None:
            return even_chunks(start, tokens, self._largest)
        return self._planned(self._work.chunk_cost(method), start, tokens)

    def _plan(self, cost: ChunkCost, start: int, tokens: int) -> tuple[int, ...]:
        return plan_chunks(start, tokens, self._largest, cost)


def even_chunks(start: int, tokens: int, largest: int) -> tuple[int, ...]:
    """As few chunks as can be: all `largest`, and what is left."""
    whole, rest = divmod(tokens - start, largest)
    return (largest,) * whole + (rest,) * (rest > 0)


def plan_chunks(start: int, tokens: int, largest: int, cost: ChunkCost) -> tuple[int, ...]:
    """Sizes of the chunks of tokens start .. tokens-1 of a prompt: multiples of a block but for the last,
    none above `largest` (a multiple too), within a percent of the shortest time that there is where stages
    take as long as each other, and within three where they do not."""
    best = even_chunks(start, tokens, largest)
    if len(cost.stages) == 1 or len(best) == 0:
        return best
    least, chosen = takes(best, start, cost), len(best)
    for count in _counts(start, tokens, len(best), cost):
        sizes = _shortest(start, tokens, count, largest, 1.0, cost)
        time = takes(sizes, start, cost)
        if time < least:
            best, least, chosen = sizes, time, count
    if cost.alike or chosen > _MANY:
        return best
    for growth, more in product(_GROWTHS, _MORE):
        sizes = _shortest(start, tokens, round(chosen * more), largest, growth, cost)
        time = takes(sizes, start, cost)
        if time < least:
            best, least = sizes, time
    return best


def takes(sizes: Sequence[int], start: int, cost: ChunkCost) -> float:
    """From the first chunk's start to the last one's end, in `StageCost`'s unit: a stage begins with a chunk
    when it and the one before it are done with theirs."""
    free = [0.0] * len(cost.stages)
    for size in sizes:
        there = 0.0
        for number, stage in enumerate(cost.stages):
            there = free[number] = max(free[number], there) + stage.of(start, size)
        start += size
    return free[-1]


def _counts(start: int, tokens: int, fewest: int, cost: ChunkCost) -> list[int]:
    """Numbers of chunks to try: around that at which a chunk more costs what it saves if chunks could be cut
    anywhere. The time is flat there."""
    bare = cost.of(start, tokens - start) - cost.mean.fixed
    middle = math.sqrt((len(cost.stages) - 1) * bare / max(cost.mean.fixed, 1e-9))
    most = -(-(tokens - start) // BLOCK)
    low, high = (min(max(fewest, round(middle * factor)), most) for factor in (0.5, 2.0))
    tried = {round(low + (high - low) * n / (_TRIES - 1)) for n in range(_TRIES)}
    return sorted(tried)


def _shortest(
    start: int, tokens: int, count: int, largest: int, growth: float, cost: ChunkCost
) -> tuple[int, ...]:
    """At most `count` chunks, each of which takes `growth` times as long as the one before at most, as short
    as can be."""
    first = max(1.0, growth ** (1 - count))  # the one that may take least takes 1
    together = sum(first * growth**n for n in range(count))
    low = (cost.of(start, tokens - start) + (count - 1) * cost.mean.fixed) / together  # if cut anywhere
    step, best = cost.of(max(start, tokens - BLOCK), BLOCK) - cost.mean.fixed, None
    enough = max(cost.of(max(start, tokens - largest), largest), cost.of(start, min(largest, tokens - start)))
    while best is None and low < enough:
        high = low + step
        best = _packed(start, tokens, count, largest, high * first, growth, cost)
        if best is None:
            low, step = high, 2 * step
    if best is None:
        return even_chunks(start, tokens, largest)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        sizes = _packed(start, tokens, count, largest, middle * first, growth, cost)
        if sizes is None:
            low = middle
        else:
            best, high = sizes, middle
    return best


def _packed(
    start: int, tokens: int, count: int, largest: int, most: float, growth: float, cost: ChunkCost
) -> tuple[int, ...] | None:
    """As few chunks as can be of which the first costs `most` at most, and each later one `growth` times as
    much as the one before may; None if these are more than `count`."""
    sizes: list[int] = []
    while start < tokens:
        left = tokens - start
        size = min(cost.fitting(start, most), largest)
        if size < left <= largest and cost.of(start, left) <= most:
            size = left  # the last one need not be whole blocks
        size = min(size, left)
        if size == 0 or len(sizes) == count:
            return None
        sizes.append(size)
        start += size
        most *= growth
    return tuple(sizes)
