"""The decode runner: memory at fixed addresses, rows that come and go, and a page that belongs to nobody."""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from deltafront.workers.decode.page_selection import plan_layers
from deltafront.workers.decode.runner import DecodeRunner, Row, StepRows
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.model.decoder import LayerStack
from deltafront.workers.settings import DecodeConfig

PAGES = 90
SAMPLINGS = (
    Sampling(),
    Sampling(1.0, seed=1),
    Sampling(0.7, top_k=9, seed=2),
    Sampling(1.2, top_p=0.6, seed=-3),
    Sampling(1.0, top_k=30, top_p=0.8, seed=2**64 - 1),
)


def make_runner(stack: LayerStack) -> DecodeRunner:
    config = DecodeConfig(full_layers=(0,), delta_layers=(2,), page_budget=3, recency=1)
    plan = plan_layers(config, stack.config.layers)
    return DecodeRunner(stack, plan, pages=PAGES, max_batch=4, max_pages=20)


class Request:
    """A prompt read into pages of its own, and its answer. All but the pages follows from `seed`."""

    def __init__(self, runner: DecodeRunner, seed: int, free: list[int]) -> None:
        chance = random.Random(seed)
        tokens = chance.choice((3, 16, 40, 90, 250))
        self.seed, self.left = seed, chance.randrange(5, 30)
        self.pages = tuple(free.pop() for _ in range(-(-(tokens + 30) // 16)))
        ids = array("I", [chance.randrange(198) for _ in range(tokens)])
        logits_V = runner.append(self.pages, 0, ids, last=True)
        self.row = Row(seed, self.pages, tokens, 0, chance.choice(SAMPLINGS), chance.random() < 0.5)
        (chosen,) = runner.first_tokens([logits_V], [self.row])
        self.row = replace(self.row, token=chosen.token)
        self.answer = [chosen.token]

    def take(self, token: int) -> None:
        self.row = replace(self.row, token=token, length=self.row.length + 1)
        self.answer.append(token)
        self.left -= 1


def tensors(rows: StepRows) -> dict[str, torch.Tensor]:
    found = {f"sampling.{name}": x for name, x in vars(rows.sampling).items()} | vars(rows)
    return {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_come_and_go_are_answered_as_alone_from_the_same_memory(
    tiny_stack: LayerStack, seed: int
) -> None:
    """Nor do they read the scratch page, which holds no numbers here."""
    chance, runner = random.Random(seed), make_runner(tiny_stack)
    for side in (runner.cache.k_LPSGD, runner.cache.v_LPSGD):
        side[:, runner.scratch_page] = float("nan")
    before = {name: x.data_ptr() for name, x in tensors(runner.rows).items()}
    assert {"table_RP", "ids_R", "lengths_R", "selecting", "full", "sampling.seed_R"} <= set(before)
    live: list[Request] = []
    every: list[Request] = []
    free = chance.sample(range(PAGES), PAGES)
    for _ in range(50):
        while len(live) < 4 and (not live or chance.random() < 0.3):
            live.insert(chance.randrange(len(live) + 1), Request(runner, 100 * seed + len(every), free))
            every.append(next(r for r in live if r not in every))
        for request, chosen in zip(live, runner.decode([r.row for r in live]), strict=True):
            assert math.isfinite(chosen.logprob)
            request.take(chosen.token)
        for request in [r for r in live if r.left == 0 or chance.random() < 0.05]:
            live.remove(request)
            free += request.pages
        assert {name: x.data_ptr() for name, x in tensors(runner.rows).items()} == before
    assert len(every) > 8
    alone_runner = make_runner(tiny_stack)
    for request in every:
        alone = Request(alone_runner, request.seed, list(range(PAGES)))
        while len(alone.answer) < len(request.answer):
            alone.take(alone_runner.decode([alone.row])[0].token)
        assert alone.answer == request.answer


def test_a_step_reads_slices_of_the_rows_and_its_shapes_are_few(tiny_stack: LayerStack) -> None:
    runner = make_runner(tiny_stack)
    made = [
        Row(n, tuple(range(n, n + pages)), 1, 7, SAMPLINGS[n], n == 1) for n, pages in enumerate((3, 18, 2))
    ]
    batch = runner.rows.batch(made)
    assert batch.table_RP.shape == (3, 32) and runner.rows.table_RP.shape == (4, 32)
    assert batch.table_RP[0].tolist() == [0, 1, 2] + [runner.scratch_page] * 29
    for name in ("table_RP", "lengths_R", "ids_R", "selecting", "full"):
        assert getattr(batch, name).data_ptr() == getattr(runner.rows, name).data_ptr()
    assert batch.any_selects and batch.sampling.draws and batch.sampling.filters
    assert runner.rows.batch(made) is batch, "nothing is written while nothing changes"
    fewer = runner.rows.batch(made[::2])
    assert fewer.table_RP.shape == (2, 16) and not fewer.any_selects and fewer.selecting is None
    assert fewer.table_RP[1].tolist() == [2, 3] + [runner.scratch_page] * 14
    assert fewer.sampling.seed_R.tolist() == [0, 2]


@pytest.mark.parametrize("max_batch", [1, 3])
async def test_warming_up_writes_to_the_scratch_page_alone(bench: Any, max_batch: int) -> None:
    """And nobody is ever given that page: the pool is as large as it was configured."""
    run = await bench(
        warm_up=True,
        cache_tokens=512,
        page_selection="delta",
        delta_layers=(2,),
        page_budget=3,
        recency=1,
        max_batch=max_batch,
    )
    runner = run.engine._runner
    assert (await run.engine.stats()).pages_total == 32
    assert (runner.cache.pages, runner.scratch_page) == (33, 32)
    for side in (runner.cache.k_LPSGD, runner.cache.v_LPSGD):
        assert not side[:, :32].any() and side[:, 32].any() and side.isfinite().all()
    await run.reserve("everything", 500, 12)
    (request,) = run.engine._requests
    assert sorted(request.holding.table) == list(range(32))
    await run.engine.cancel("everything")
