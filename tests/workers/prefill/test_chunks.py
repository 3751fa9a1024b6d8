"""How prompts are cut into chunks: against every way there is, and by what the pipeline then takes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from deltafront.workers.messages.methods import method_spec
from deltafront.workers.prefill.chunks import (
    ChunkCost,
    LayerWork,
    even_chunks,
    plan_chunks,
    takes,
)

LLAMA_8B = LayerWork(layers=32, linear=218_103_808, pair=8192)
DENSE, SPARSE = method_spec("dense"), method_spec("dpxa")


def ways(tokens: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Every cut into multiples of 128 and a last chunk of any length."""
    if 0 < tokens <= largest:
        yield (tokens,)
    for size in range(128, min(largest, tokens - 1) + 1, 128):
        yield from ((size, *rest) for rest in ways(tokens - size, largest))


def pipelined(sizes: tuple[int, ...], start: int, stages: int, cost: ChunkCost) -> float:
    """Chunk by chunk and stage by stage: each begins when the one before has ended and its input is there."""
    free = [0.0] * stages
    for size in sizes:
        there, took = 0.0, cost.of(start, size)
        for stage in range(stages):
            there = free[stage] = max(free[stage], there) + took
        start += size
    return free[-1]


def test_the_formula_is_what_a_pipeline_takes() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        sizes = tuple(rng.randrange(1, 9) * 128 for _ in range(rng.randrange(1, 12)))
        cost = ChunkCost(rng.choice((0.0, 1e-4, 1e-2)), rng.choice((0.0, 50.0)))
        stages, start = rng.randrange(1, 6), 128 * rng.randrange(9)
        assert takes(sizes, start, stages, cost) == pytest.approx(pipelined(sizes, start, stages, cost))


@pytest.mark.parametrize("fixed", [5.0, 60.0, 300.0, 2000.0])
@pytest.mark.parametrize("pair", [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_no_other_cut_is_faster_by_more_than_a_percent(stages: int, pair: float, fixed: float) -> None:
    cost = ChunkCost(pair, fixed)
    for tokens, largest, start in ((1500, 1024, 0), (1408, 384, 128), (77, 512, 0), (1280, 2048, 4096)):
        sizes = plan_chunks(start, start + tokens, stages, largest, cost)
        assert sum(sizes) == tokens and max(sizes) <= largest
        assert all(size % 128 == 0 for size in sizes[:-1])
        best = min(pipelined(way, start, stages, cost) for way in ways(tokens, largest))
        assert pipelined(sizes, start, stages, cost) <= 1.01 * best, (sizes, tokens)


@pytest.mark.parametrize("method", [DENSE, SPARSE], ids=lambda m: m.name)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [131_072, 524_288])
def test_long_prompts_lose_little_to_filling_and_draining(tokens: int, stages: int, method: object) -> None:
    cost = LLAMA_8B.chunk_cost(method, stages)  # type: ignore[arg-type]
    sizes = plan_chunks(0, tokens, stages, 16_384, cost)
    alone = takes(even_chunks(0, tokens, 16_384), 0, 1, cost)
    planned = alone / takes(sizes, 0, stages, cost)
    by_hand = [alone / takes(even_chunks(0, tokens, 128 << n), 0, stages, cost) for n in range(3, 8)]
    assert planned >= max(by_hand) - 0.005, "no even chunk length does better"
    assert planned >= (0.91 if stages == 2 else 0.72)
    assert all(size % 512 == 0 for size in sizes[:-1] if size >= 2048)


def test_chunks_shrink_as_attention_grows() -> None:
    sizes = plan_chunks(0, 131_072, 2, 16_384, LLAMA_8B.chunk_cost(DENSE, 2))
    assert all(b <= a for a, b in itertools.pairwise(sizes)) and sizes[-2] < sizes[0] / 2
    sizes = plan_chunks(0, 131_072, 2, 16_384, LLAMA_8B.chunk_cost(SPARSE, 2))
    assert sizes[-2] > sizes[0] / 2, "sparse attention hardly grows"


def test_products_in_8_bits_leave_a_chunk_s_fixed_cost_and_attention_as_they_are() -> None:
    """In seconds: a token's worth takes 660 / 1210 of the time."""
    eight = replace(LLAMA_8B, quantised=True)
    for method in (DENSE, SPARSE):
        plain, quick = LLAMA_8B.chunk_cost(method, 2), eight.chunk_cost(method, 2)
        assert (quick.pair, quick.fixed) == pytest.approx((plain.pair * 1210 / 660, plain.fixed * 1210 / 660))
    chunks = [
        len(plan_chunks(0, 131_072, 2, 16_384, work.chunk_cost(SPARSE, 2))) for work in (LLAMA_8B, eight)
    ]
    assert chunks[1] < chunks[0], "longer ones, since each costs as much beside its tokens as before"


def test_one_stage_and_small_models_take_the_largest_chunks() -> None:
    assert plan_chunks(0, 40_000, 1, 16_384, LLAMA_8B.chunk_cost(DENSE, 1)) == (16_384, 16_384, 7_232)
    small = LayerWork(layers=30, linear=3_538_944, pair=1152)
    assert len(plan_chunks(0, 40_000, 2, 16_384, small.chunk_cost(SPARSE, 2))) == 3
    assert plan_chunks(128, 256, 3, 512, ChunkCost(0.0, 1e6)) == (128,)
