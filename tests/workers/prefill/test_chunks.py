"""Compares planned chunks with every possible cut of a prompt, and checks the simulated pipeline time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from deltafront.kernels.methods import method_spec
from deltafront.service.cli.size import SHAPES
from deltafront.workers.prefill.group.chunks import (
    ChunkCost,
    ModelWork,
    StageCost,
    StageWork,
    even_chunks,
    plan_chunks,
    takes,
)

LINEAR, PAIR, QKV = 218_103_808, 8192, 25_165_824
"""Multiply-adds of an 8B layer: per token, per pair of query and key, and of the QKV projection per token."""
FEED = 176_160_768
"""Multiply-adds of its MLP per token."""
DENSE, SPARSE = method_spec("dense"), method_spec("dpxa")


def over(stages: int, quantised: bool = False) -> ModelWork:
    return ModelWork.of(SHAPES["8b"], stages, quantised)


def cost_of(per_pair: float, fixed: float, factors: tuple[float, ...], even: int = 128) -> ChunkCost:
    """Return the cost of stages whose times have these ratios for every chunk."""
    return ChunkCost(tuple(StageCost(one, one * per_pair, one * fixed) for one in factors), even)


def alike(cost: ChunkCost, stages: int | None = None) -> ChunkCost:
    """Return the same cost with all stages equal to the mean stage."""
    return replace(cost, stages=(cost.mean,) * (stages or len(cost.stages)))


def ways(tokens: int, largest: int, even: int = 128) -> Iterator[tuple[int, ...]]:
    """Yield every list of chunk sizes. All but the last are multiples of 128; from `even` on, of `even`."""
    if 0 < tokens <= largest:
        yield (tokens,)
    for size in range(128, min(largest, tokens - 1) + 1, 128):
        if size < even or size % even == 0:
            yield from ((size, *rest) for rest in ways(tokens - size, largest, even))


def test_equal_stages_take_the_time_of_a_proportionate_flow_shop() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        sizes = tuple(rng.randrange(1, 9) * 128 for _ in range(rng.randrange(1, 12)))
        stages, start = rng.randrange(1, 6), 128 * rng.randrange(9)
        cost = cost_of(rng.choice((0.0, 1e-4, 1e-2)), rng.choice((0.0, 50.0)), (1.0,) * stages)
        at = [start, *itertools.accumulate(sizes, initial=start)][1:]
        chunks = [cost.of(*chunk) for chunk in zip(at, sizes, strict=False)]
        assert takes(sizes, start, cost) == pytest.approx(sum(chunks) + (stages - 1) * max(chunks))


def test_unequal_stages_take_the_time_of_the_slowest_path() -> None:
    """Paths go from the first chunk on the first stage to the last chunk on the last stage, one step at a
    time."""
    for seed in range(50):
        rng = random.Random(seed)
        sizes = tuple(rng.randrange(1, 9) * 128 for _ in range(rng.randrange(1, 7)))
        stages = tuple(
            StageCost(rng.choice((0.6, 0.9, 1.2)), rng.choice((0.0, 1e-4, 1e-3)), rng.choice((0.0, 50.0)))
            for _ in range(rng.randrange(1, 4))
        )
        cost = ChunkCost(stages)

        def through(chunk: int, stage: int, sizes: tuple[int, ...] = sizes, cost: ChunkCost = cost) -> float:
            own = cost.stages[stage].of(sum(sizes[:chunk]), sizes[chunk])
            before = [through(chunk - 1, stage)] if chunk else []
            before += [through(chunk, stage - 1)] if stage else []
            return own + max(before, default=0.0)

        assert takes(sizes, 0, cost) == pytest.approx(through(len(sizes) - 1, len(stages) - 1))


@pytest.mark.parametrize("fixed", [5.0, 60.0, 300.0, 2000.0])
@pytest.mark.parametrize("per_pair", [0.0, 1e-5, 1e-3])
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
        ((0.97, 1.03), 3),
    ],
    ids=str,
)
def test_planned_chunks_are_nearly_the_fastest_cut(
    stages: tuple[float, ...], percent: float, per_pair: float, fixed: float
) -> None:
    _no_other_cut(cost_of(per_pair, fixed, stages), percent)


@pytest.mark.parametrize("fixed", [5.0, 60.0, 300.0, 2000.0])
@pytest.mark.parametrize("per_pair", [1e-5, 1e-3])
@pytest.mark.parametrize("stages", [((0.98, 1.03), (1.02, 0.97)), ((1.02, 0.8), (0.98, 1.2))], ids=str)
def test_planned_chunks_are_nearly_the_fastest_for_unequal_stages(
    stages: tuple[tuple[float, float], ...], per_pair: float, fixed: float
) -> None:
    """One stage has more GEMMs, the other more attention, so that the slower stage changes within a
    prompt."""
    _no_other_cut(ChunkCost(tuple(StageCost(one, more * per_pair, fixed) for one, more in stages)), 3)


def _no_other_cut(cost: ChunkCost, percent: float) -> None:
    for tokens, largest, start in ((1500, 1024, 0), (1408, 384, 128), (77, 512, 0), (1280, 2048, 4096)):
        sizes = plan_chunks(start, start + tokens, largest, cost)
        assert sum(sizes) == tokens and max(sizes) <= largest
        assert all(size % 128 == 0 for size in sizes[:-1])
        best = min(takes(way, start, cost) for way in ways(tokens, largest))
        assert takes(sizes, start, cost) <= (1 + percent / 100) * best, (sizes, tokens)


@pytest.mark.parametrize("fixed", [60.0, 300.0])
@pytest.mark.parametrize("stages", [(1.0, 1.0), (1.0, 0.94), (1.0, 1.0, 0.9)], ids=str)
def test_longer_chunks_are_multiples_of_a_coarser_step(stages: tuple[float, ...], fixed: float) -> None:
    """Compared with every cut into such multiples and a rest at any place."""
    cost = cost_of(1e-3, fixed, stages, even=512)
    for tokens, largest in ((1664, 1024), (1536, 1536), (1500, 1024)):
        sizes = plan_chunks(0, tokens, largest, cost)
        assert sum(sizes) == tokens and all(size % (128 if size < 512 else 512) == 0 for size in sizes[:-1])
        best = min(takes(way, 0, cost) for way in ways(tokens, largest, 512))
        assert takes(sizes, 0, cost) <= 1.04 * best, (sizes, tokens)


def test_stage_work_counts_the_stages_multiply_adds_exactly() -> None:
    """The first stage has 15 layers and the attention of the 16th. The second has the rest, with only QKV in
    the last layer."""
    first, last = over(2).stages
    assert first == StageWork(16 * LINEAR - FEED, 16 * PAIR, halves=31)
    assert last == StageWork(FEED + 15 * LINEAR + QKV, 15 * PAIR, halves=32)
    assert over(1).stages == (StageWork(31 * LINEAR + QKV, 31 * PAIR, halves=63),)
    costs = over(2).chunk_cost(DENSE).stages
    assert [one.per_token for one in costs] == pytest.approx([0.97652, 1.02348], rel=1e-4)
    assert costs[0].per_pair / costs[1].per_pair == pytest.approx(16 / 15)


def test_chunks_shrink_under_dense_and_grow_under_sparse_attention() -> None:
    """The slower stage is a different one for each."""
    for method, slower in ((DENSE, 0), (SPARSE, 1)):
        cost = over(2).chunk_cost(method)
        whole = [stage.of(0, 131_072) for stage in cost.stages]
        assert whole[slower] > whole[1 - slower]
        sizes = plan_chunks(0, 131_072, 16_384, cost)
        equal = plan_chunks(0, 131_072, 16_384, alike(cost))
        assert takes(sizes, 0, cost) < takes(equal, 0, cost)
        chunks = [cost.of(sum(sizes[:n]), size) for n, size in enumerate(sizes[:-1])]
        assert (chunks[0] > chunks[-1]) == (slower == 0)


def test_chunks_shrink_towards_the_end_for_a_lighter_last_stage() -> None:
    """The stages have whole layers. For 131,072 tokens, the plan is about 1% faster than the best plan for
    equal stages."""
    stages = StageWork(16 * LINEAR, 16 * PAIR, 32), StageWork(15 * LINEAR + QKV, 15 * PAIR, 31)
    for method, least in ((SPARSE, 0.012), (DENSE, 0.012)):
        cost = ModelWork(stages).chunk_cost(method)
        equal = plan_chunks(0, 131_072, 16_384, alike(cost))
        sizes = plan_chunks(0, 131_072, 16_384, cost)
        assert takes(sizes, 0, cost) < (1 - least) * takes(equal, 0, cost)
        assert sizes[-1] < equal[-2] and sizes[0] > equal[0]


@pytest.mark.parametrize("method", [DENSE, SPARSE], ids=lambda m: m.name)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [131_072, 524_288])
def test_long_prompts_lose_little_time_to_pipeline_bubbles(tokens: int, stages: int, method: object) -> None:
    cost = over(stages).chunk_cost(method)  # type: ignore[arg-type]
    sizes = plan_chunks(0, tokens, 16_384, cost)
    alone = takes(even_chunks(0, tokens, 16_384), 0, alike(cost, 1))
    planned = alone / takes(sizes, 0, cost)
    by_hand = [alone / takes(even_chunks(0, tokens, 128 << n), 0, cost) for n in range(3, 8)]
    assert planned >= max(by_hand) - 0.005, "no even chunk length does better"
    slowest = max(cost.stages, key=lambda stage: stage.of(0, tokens))
    bare = slowest.of(0, tokens) - slowest.per_chunk
    anywhere = min((bare / n + slowest.per_chunk) * (n + stages - 1) for n in range(1, 1000))
    assert takes(sizes, 0, cost) <= 1.03 * anywhere, "of chunks that take as long as each other, cut anywhere"
    assert all(size % 512 == 0 for size in sizes[:-1] if size >= 512)


def test_chunks_shrink_as_attention_grows() -> None:
    """Sizes are rounded to multiples of `even`, so that a chunk may be one multiple longer than the previous
    one, but not two."""
    equal = alike(over(2).chunk_cost(DENSE))
    sizes = plan_chunks(0, 131_072, 16_384, equal)
    assert all(b <= a + equal.even for a, b in itertools.pairwise(sizes)) and sizes[-2] < sizes[0] / 2
    equal = alike(over(2).chunk_cost(SPARSE))
    sizes = plan_chunks(0, 131_072, 16_384, equal)
    assert sizes[-2] > sizes[0] / 2, "sparse attention hardly grows"


def test_fp8_gemms_change_only_a_chunks_cost_per_token() -> None:
    """In seconds, a token's GEMMs take 660 / 1210 of the time."""
    for method in (DENSE, SPARSE):
        both = over(2).chunk_cost(method).stages, over(2, quantised=True).chunk_cost(method).stages
        for plain, quick in zip(*both, strict=True):
            times = 1210 / 660
            assert (quick.per_pair, quick.per_chunk) == pytest.approx(
                (plain.per_pair * times, plain.per_chunk * times)
            )
            assert quick.per_token == plain.per_token
    costs = (over(2, quantised).chunk_cost(SPARSE) for quantised in (False, True))
    chunks = [len(plan_chunks(0, 131_072, 16_384, cost)) for cost in costs]
    assert chunks[1] < chunks[0], "longer ones, since each costs as much beside its tokens as before"


def test_one_stage_and_small_models_get_the_largest_chunks() -> None:
    assert plan_chunks(0, 40_000, 16_384, over(1).chunk_cost(DENSE)) == (16_384, 16_384, 7_232)
    small = ModelWork((StageWork(15 * 3_538_944, 15 * 1152, 30),) * 2)
    assert len(plan_chunks(0, 40_000, 16_384, small.chunk_cost(SPARSE))) == 3
    assert plan_chunks(128, 256, 512, cost_of(0.0, 1e6, (1.0,) * 3)) == (128,)


@pytest.mark.parametrize("method", [DENSE, SPARSE], ids=lambda m: m.name)
def test_long_prompt_may_be_cut_into_the_shortest_chunks(method: object) -> None:
    cost = over(2).chunk_cost(method)  # type: ignore[arg-type]
    assert plan_chunks(0, 524_288, 128, cost) == (128,) * 4096
