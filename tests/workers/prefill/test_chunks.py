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

LLAMA_8B = LayerWork(layers=(32,), linear=218_103_808, pair=8192, ends=25_165_824)
DENSE, SPARSE = method_spec("dense"), method_spec("dpxa")


def over(stages: int, work: LayerWork = LLAMA_8B) -> LayerWork:
    return replace(work, layers=(work.layers[0] // stages,) * stages)


def ways(tokens: int, largest: int, even: int = 128) -> Iterator[tuple[int, ...]]:
    """Every cut into multiples of 128, and of `even` from there on, and a last chunk of any length."""
    if 0 < tokens <= largest:
        yield (tokens,)
    for size in range(128, min(largest, tokens - 1) + 1, 128):
        if size < even or size % even == 0:
            yield from ((size, *rest) for rest in ways(tokens - size, largest, even))


def test_equal_stages_take_what_a_proportionate_flow_shop_does() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        sizes = tuple(rng.randrange(1, 9) * 128 for _ in range(rng.randrange(1, 12)))
        stages, start = rng.randrange(1, 6), 128 * rng.randrange(9)
        cost = ChunkCost(rng.choice((0.0, 1e-4, 1e-2)), rng.choice((0.0, 50.0)), (1.0,) * stages)
        at = [start, *itertools.accumulate(sizes, initial=start)][1:]
        chunks = [cost.of(*chunk) for chunk in zip(at, sizes, strict=False)]
        assert takes(sizes, start, cost) == pytest.approx(sum(chunks) + (stages - 1) * max(chunks))


def test_stages_that_differ_take_the_dearest_way_through() -> None:
    """Of all ways from the first chunk at the first stage to the last at the last one, a step each."""
    for seed in range(50):
        rng = random.Random(seed)
        sizes = tuple(rng.randrange(1, 9) * 128 for _ in range(rng.randrange(1, 7)))
        stages = tuple(rng.choice((0.6, 0.9, 1.0, 1.2)) for _ in range(rng.randrange(1, 4)))
        cost = ChunkCost(1e-4, 50.0, stages)

        def through(chunk: int, stage: int, sizes: tuple[int, ...] = sizes, cost: ChunkCost = cost) -> float:
            own = cost.stages[stage] * cost.of(sum(sizes[:chunk]), sizes[chunk])
            before = [through(chunk - 1, stage)] if chunk else []
            before += [through(chunk, stage - 1)] if stage else []
            return own + max(before, default=0.0)

        assert takes(sizes, 0, cost) == pytest.approx(through(len(sizes) - 1, len(stages) - 1))


@pytest.mark.parametrize("fixed", [5.0, 60.0, 300.0, 2000.0])
@pytest.mark.parametrize("pair", [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize(
    ("stages", "percent"),
    [
        ((1.0,), 1),
        ((1.0, 1.0), 1),
        ((1.0,) * 3, 1),
        ((1.0,) * 5, 1),
        ((1.0, 0.94), 3),
        ((1.0, 0.8), 3),
        ((1.0, 1.0, 0.9), 3),
        ((0.97, 0.97, 1.03), 3),
    ],
    ids=str,
)
def test_no_other_cut_is_much_faster(
    stages: tuple[float, ...], percent: float, pair: float, fixed: float
) -> None:
    cost = ChunkCost(pair, fixed, stages)
    for tokens, largest, start in ((1500, 1024, 0), (1408, 384, 128), (77, 512, 0), (1280, 2048, 4096)):
        sizes = plan_chunks(start, start + tokens, largest, cost)
        assert sum(sizes) == tokens and max(sizes) <= largest
        assert all(size % 128 == 0 for size in sizes[:-1])
        best = min(takes(way, start, cost) for way in ways(tokens, largest))
        assert takes(sizes, start, cost) <= (1 + percent / 100) * best, (sizes, tokens)


@pytest.mark.parametrize("fixed", [60.0, 300.0])
@pytest.mark.parametrize("stages", [(1.0, 1.0), (1.0, 0.94), (1.0, 1.0, 0.9)], ids=str)
def test_longer_chunks_come_in_even_steps(stages: tuple[float, ...], fixed: float) -> None:
    """Against every way in such steps; what is left of a prompt falls where it may."""
    cost = ChunkCost(1e-3, fixed, stages, even=512)
    for tokens, largest in ((1664, 1024), (1536, 1536), (1500, 1024)):
        sizes = plan_chunks(0, tokens, largest, cost)
        assert sum(sizes) == tokens and all(size % (128 if size < 512 else 512) == 0 for size in sizes[:-1])
        best = min(takes(way, 0, cost) for way in ways(tokens, largest, 512))
        assert takes(sizes, 0, cost) <= 1.04 * best, (sizes, tokens)


def test_a_last_stage_that_takes_less_is_given_shorter_chunks_towards_the_end() -> None:
    """What a prompt of 131,072 tokens gains by it over the best cut for equal stages, by this model: a
    hundredth. With four stages the three that are equal decide."""
    for method, least in ((SPARSE, 0.012), (DENSE, 0.012)):
        cost = over(2).chunk_cost(method)
        assert cost.stages == (1.0, pytest.approx((15 + 0.1154) / 16, rel=1e-3))
        equal = plan_chunks(0, 131_072, 16_384, replace(cost, stages=(1.0, 1.0)))
        sizes = plan_chunks(0, 131_072, 16_384, cost)
        assert takes(sizes, 0, cost) < (1 - least) * takes(equal, 0, cost)
        assert sizes[-1] < equal[-2] and sizes[0] > equal[0]
    uneven = replace(LLAMA_8B, layers=(11, 11, 10)).chunk_cost(SPARSE)
    assert uneven.stages == pytest.approx((33 / 32, 33 / 32, 3 * 9.1154 / 32), rel=1e-4)


@pytest.mark.parametrize("method", [DENSE, SPARSE], ids=lambda m: m.name)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [131_072, 524_288])
def test_long_prompts_lose_little_to_filling_and_draining(tokens: int, stages: int, method: object) -> None:
    cost = over(stages).chunk_cost(method)  # type: ignore[arg-type]
    sizes = plan_chunks(0, tokens, 16_384, cost)
    alone = takes(even_chunks(0, tokens, 16_384), 0, replace(cost, stages=(1.0,)))
    planned = alone / takes(sizes, 0, cost)
    by_hand = [alone / takes(even_chunks(0, tokens, 128 << n), 0, cost) for n in range(3, 8)]
    assert planned >= max(by_hand) - 0.005, "no even chunk length does better"
    bare = cost.of(0, tokens) - cost.fixed
    anywhere = min((bare / n + cost.fixed) * (n + stages - 1) for n in range(1, 1000))
    assert takes(sizes, 0, cost) <= 1.03 * anywhere, "of chunks that take as long as each other, cut anywhere"
    assert all(size % 512 == 0 for size in sizes[:-1] if size >= 512)


def test_chunks_shrink_as_attention_grows() -> None:
    equal = replace(over(2).chunk_cost(DENSE), stages=(1.0, 1.0))
    sizes = plan_chunks(0, 131_072, 16_384, equal)
    assert all(b <= a for a, b in itertools.pairwise(sizes)) and sizes[-2] < sizes[0] / 2
    equal = replace(over(2).chunk_cost(SPARSE), stages=(1.0, 1.0))
    sizes = plan_chunks(0, 131_072, 16_384, equal)
    assert sizes[-2] > sizes[0] / 2, "sparse attention hardly grows"


def test_products_in_8_bits_leave_a_chunk_s_fixed_cost_and_attention_as_they_are() -> None:
    """In seconds: a token's worth takes 660 / 1210 of the time."""
    eight = replace(LLAMA_8B, quantised=True)
    for method in (DENSE, SPARSE):
        plain, quick = over(2).chunk_cost(method), over(2, eight).chunk_cost(method)
        assert (quick.pair, quick.fixed) == pytest.approx((plain.pair * 1210 / 660, plain.fixed * 1210 / 660))
    costs = (over(2, work).chunk_cost(SPARSE) for work in (LLAMA_8B, eight))
    chunks = [len(plan_chunks(0, 131_072, 16_384, cost)) for cost in costs]
    assert chunks[1] < chunks[0], "longer ones, since each costs as much beside its tokens as before"


def test_one_stage_and_small_models_take_the_largest_chunks() -> None:
    assert plan_chunks(0, 40_000, 16_384, LLAMA_8B.chunk_cost(DENSE)) == (16_384, 16_384, 7_232)
    small = LayerWork(layers=(15, 15), linear=3_538_944, pair=1152, ends=552_960)
    assert len(plan_chunks(0, 40_000, 16_384, small.chunk_cost(SPARSE))) == 3
    assert plan_chunks(128, 256, 512, ChunkCost(0.0, 1e6, (1.0,) * 3)) == (128,)


@pytest.mark.parametrize("method", [DENSE, SPARSE], ids=lambda m: m.name)
def test_a_long_prompt_in_the_shortest_chunks_is_cut_all_the_same(method: object) -> None:
    cost = over(2).chunk_cost(method)  # type: ignore[arg-type]
    assert plan_chunks(0, 524_288, 128, cost) == (128,) * 4096
