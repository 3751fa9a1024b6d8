"""Tests the decode runner: buffers at fixed addresses, rows that join and leave, and the scratch page."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.layers.kv_int8 import NOT_A_NUMBER
from deltafront.kernels.sampling.sample import SamplingRows
from deltafront.workers.decode import runner as decode_runner
from deltafront.workers.decode.decode_attention import plan_layers
from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.runner import DecodeRunner, ReadPart
from deltafront.workers.decode.step_rows import BatchShape, Row, SampledToken, StepRows
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.model.decoder.load import load_stack
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.weights.stack_weights import StackSpec
from deltafront.workers.settings import DecodeConfig

from ..tiny_model import make_tiny_model

PAGES, MAX_BATCH = 120, 5
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_k=9, seed=2),
    Sampling(temperature=1.2, top_p=0.6, seed=-3),
    Sampling(temperature=1.0, top_k=30, top_p=0.8, seed=2**64 - 1),
)


def make_runner(stack: LayerStack) -> DecodeRunner:
    config = DecodeConfig(full_layers=(0,), delta_layers=(2,), page_budget=3, recency=1)
    plan = plan_layers(config, stack.config.layers)
    return DecodeRunner(stack, plan, pages=PAGES, max_batch=MAX_BATCH, max_pages=20)


class Request:
    """A prompt prefilled into its own pages, and its answer. All but the pages depends only on `seed`."""

    def __init__(self, runner: DecodeRunner, seed: int, free: list[int]) -> None:
        chance = random.Random(seed)
        tokens = chance.choice((3, 16, 40, 90, 250))
        self.seed, self.left = seed, chance.randrange(5, 30)
        self.pages = tuple(free.pop() for _ in range(-(-(tokens + 30) // 16)))
        ids = array("I", [chance.randrange(198) for _ in range(tokens)])
        logits_V = runner.append(self.pages, Read(0, ids), last=True).logits_V
        self.row = Row(seed, self.pages, tokens, 0, chance.choice(SAMPLINGS), chance.random() < 0.5)
        (chosen,) = runner.first_tokens([logits_V], [self.row])
        self.row = replace(self.row, token=chosen.token)
        self.answer, self.logprobs = [chosen.token], [chosen.logprob]

    def take(self, chosen: SampledToken) -> None:
        self.row = replace(self.row, token=chosen.token, length=self.row.length + 1)
        self.answer.append(chosen.token)
        self.logprobs.append(chosen.logprob)
        self.left -= 1


def tensors(rows: StepRows) -> dict[str, torch.Tensor]:
    found = {f"sampling.{name}": x for name, x in vars(rows.sampling).items()} | vars(rows)
    return {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}


def poison(runner: DecodeRunner, pages: Sequence[int]) -> None:
    """Fill pages with NaN; in 8 bits, with the NaN of e4m3."""
    cache = runner.cache
    for side in cache.sides[:2]:
        side[:, list(pages)] = NOT_A_NUMBER if cache.int8 else float("nan")


def written(runner: DecodeRunner, pages: Sequence[int]) -> bool:
    return any(
        not side[:, list(pages)].isnan().all() for side in (runner.cache.k_LPSGD, runner.cache.v_LPSGD)
    )


def churn(runner: DecodeRunner, seed: int, steps: int, after: Callable[[list[int]], None]) -> list[Request]:
    """Run decode steps in which requests join and leave at random, and return all requests. `after` is called
    with the free pages after each step."""
    chance = random.Random(seed)
    live: list[Request] = []
    every: list[Request] = []
    free = chance.sample(range(PAGES), PAGES)
    for _ in range(steps):
        while len(live) < MAX_BATCH and (not live or chance.random() < 0.3):
            live.insert(chance.randrange(len(live) + 1), Request(runner, 1000 * seed + len(every), free))
            every.append(next(r for r in live if r not in every))
        for request, chosen in zip(live, runner.decode([r.row for r in live]), strict=True):
            assert math.isfinite(chosen.logprob)
            request.take(chosen)
        after(free)
        for request in [r for r in live if r.left == 0 or chance.random() < 0.05]:
            live.remove(request)
            free += request.pages
            poison(runner, (*request.pages, runner.scratch_page))
    assert len(every) > 8
    return every


@pytest.mark.parametrize(("seed", "steps"), [(0, 256), (1, 50), (2, 50)])
def test_batched_requests_generate_the_same_tokens_as_alone(
    tiny_stack: LayerStack, seed: int, steps: int
) -> None:
    """Padding does not matter: it touches only the scratch page, which no request uses."""
    runner = make_runner(tiny_stack)
    poison(runner, range(PAGES + 1))
    before = {name: x.data_ptr() for name, x in tensors(runner._rows).items()}
    assert {"table_RP", "ids_R", "lengths_R", "selects_R", "sampling.seed_R"} <= set(before)
    shapes: set[BatchShape] = set()

    def after(free: list[int]) -> None:
        assert runner._rows._batch is not None
        shapes.add(runner._rows._batch.shape)
        assert not written(runner, free)
        assert {name: x.data_ptr() for name, x in tensors(runner._rows).items()} == before

    every = churn(runner, seed, steps, after)
    assert shapes <= {batch.shape for batch in make_runner(tiny_stack)._rows.padding(selecting=True)}
    assert {shape.selects for shape in shapes} == {True, False} and len({shape.rows for shape in shapes}) > 2
    alone_runner = make_runner(tiny_stack)
    for request in every:
        alone = Request(alone_runner, request.seed, list(range(PAGES)))
        while len(alone.answer) < len(request.answer):
            alone.take(alone_runner.decode([alone.row])[0])
        assert alone.answer == request.answer


@pytest.mark.parametrize(
    ("drawn", "logits_on", "device"), [(0, "cpu", "cpu"), (1, "cpu", "meta"), (0, "meta", "meta")]
)
def test_only_greedy_tokens_of_logits_on_the_host_are_chosen_there(
    tiny_stack: LayerStack, monkeypatch: pytest.MonkeyPatch, drawn: int, logits_on: str, device: str
) -> None:
    class Chosen(Exception):
        """Ends the sampling, since nothing can be computed on `meta`, the worker's device."""

    def sampled(logits_RV: torch.Tensor, sampling: SamplingRows, positions_R: torch.Tensor) -> None:
        assert {x.device.type for x in (sampling.seed_R, positions_R)} == {logits_RV.device.type}
        raise Chosen(logits_RV.device.type)

    worker = make_runner(tiny_stack)
    monkeypatch.setattr(tiny_stack, "device", torch.device("meta"))
    monkeypatch.setattr(decode_runner, "sample", sampled)
    samplings = Sampling(), Sampling(temperature=0.7 * drawn)
    rows = [Row(n, (0,), 9, 0, sampling, False) for n, sampling in enumerate(samplings)]
    logits = [np.zeros(198, dtype=np.float32), torch.zeros(198, device=logits_on)]
    with pytest.raises(Chosen, match=device):
        worker.first_tokens(logits, rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_graphs_sample_the_same_tokens_as_eager_steps(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = make_tiny_model(tmp_path)
    config = read_config(directory)
    stack = load_stack(
        directory,
        StackSpec(
            config=config,
            layers=range(config.layers),
            embedding=True,
            head=True,
            dtype=dtype,
            device=torch.device("cuda"),
        ),
    )
    graphs, eager = make_runner(stack), make_runner(stack)
    graphs.compile()
    captured = graphs._graphs
    assert captured is not None and len(captured) == 2 * 4, "sizes 1, 2, 4, 5; with and without selection"
    captive, free = (churn(runner, 0, 256, lambda free: None) for runner in (graphs, eager))
    assert [one.answer for one in captive] == [one.answer for one in free]
    assert [one.logprobs for one in captive] == [one.logprobs for one in free]
    for side in ("k_LPSGD", "v_LPSGD"):
        one, other = (getattr(runner.cache, side)[:, :PAGES].nan_to_num(9.0) for runner in (graphs, eager))
        assert torch.equal(one, other)
    assert graphs._graphs is captured, "nothing is captured later"


def test_decode_step_uses_fixed_buffers_and_pads_after_the_requests() -> None:
    device, pages = torch.device("cpu"), (3, 600, 2)
    rows = StepRows(rows=6, pages=2000, vocab=198, scratch_page=5000, device=device)
    made = [
        Row(n, tuple(range(n, n + count)), n + 1, 7 + n, SAMPLINGS[n], n == 1)
        for n, count in enumerate(pages)
    ]
    batch = rows.batch(made)
    assert batch.shape == BatchShape(4, 2048, True) and batch.table_RP.shape == (4, 2048)
    assert batch.table_RP[0].tolist() == [0, 1, 2] + [5000] * 2045
    assert batch.lengths_R.tolist() == [1, 2, 3, 0] and batch.ids_R.tolist() == [7, 8, 9, 0]
    assert batch.selects_R.tolist() == [0, 1, 0, 0]
    for name in ("table_RP", "lengths_R", "ids_R", "selects_R"):
        assert getattr(batch, name).data_ptr() == getattr(rows, name).data_ptr()
    assert batch.sampling.draws and batch.sampling.filters and batch.sampling.seed_R.tolist() == [0, 1, 2]
    assert rows.batch(made) is batch, "nothing is written while nothing changes"
    fewer = rows.batch(made[::2])
    assert fewer.shape == BatchShape(2, 2048, False), "only selection takes time for every column"
    assert fewer.table_RP[1].tolist() == [2, 3] + [5000] * 2046
    assert fewer.sampling.seed_R.tolist() == [0, 2]
    fewer.ids_R.copy_(torch.tensor([70, 90]))
    fewer.lengths_R.add_(5)  # by steps whose tokens the host does not know
    last = rows.batch([made[2], made[1]])
    assert last.ids_R.tolist() == [90, 8] and last.lengths_R.tolist() == [8, 2]
    assert last.table_RP[0, :3].tolist() == [2, 3, 5000], "moved on the device, not written"
    assert last.selects_R.tolist() == [0, 1] and last.sampling.seed_R.tolist() == [2, 1]
    short = rows.batch([replace(made[0], key=9, selects_pages=True)])
    assert short.shape == BatchShape(1, 512, True)
    again = rows.batch([replace(made[0], key=9, selects_pages=True), made[2], made[0]])
    assert again.lengths_R.tolist() == [1, 3, 1, 0], "what stood there before is gone"
    assert (again.table_RP[3] == 5000).all()


@pytest.mark.parametrize(
    ("rows", "pages", "sizes", "widths"),
    [
        (1, 1, {1}, {16}),
        (5, 512, {1, 2, 4, 5}, {512}),
        (8, 2000, {1, 2, 4, 8}, {512, 2048}),
        (16, 32768, {1, 2, 4, 8, 16}, {512, 2048, 8192, 32768}),
    ],
)
def test_pads_batches_to_few_shapes(rows: int, pages: int, sizes: set[int], widths: set[int]) -> None:
    made = StepRows(rows, pages, vocab=198, scratch_page=0, device=torch.device("cpu"))
    shapes = [batch.shape for batch in made.padding(selecting=True)]
    full = {BatchShape(size, max(widths), False) for size in sizes}
    assert set(shapes) == full | {BatchShape(size, width, True) for size in sizes for width in widths}
    assert len(shapes) == len(set(shapes))
    assert {batch.shape for batch in made.padding(selecting=False)} == full


@pytest.mark.parametrize("max_batch", [1, 3])
async def test_warm_up_writes_only_to_the_scratch_page(bench: Any, max_batch: int) -> None:
    """No request ever gets the scratch page: the pool has its configured size without it."""
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
    assert sorted(request.pages.table) == list(range(32))
    await run.engine.cancel("everything")


def test_prefill_in_layer_parts_equals_one_pass_bit_for_bit(tiny_stack: LayerStack) -> None:
    """Two prefills over one document alternate, and a third is abandoned."""
    whole, parts = make_runner(tiny_stack), make_runner(tiny_stack)
    chance, layers = random.Random(5), tiny_stack.layers.stop
    document = Read(0, array("I", [chance.randrange(198) for _ in range(400)]))
    asked = [
        Read(
            400,
            array("I", [chance.randrange(198) for _ in range(30)]),
            select_blocks=select,
            select_among=400,
        )
        for select in (0, 2, 1)
    ]
    tables = [(*range(25), *range(25 + 2 * n, 27 + 2 * n)) for n in range(3)]
    for runner in (whole, parts):
        runner.append(tables[0][:25], document, last=False)
    expected = [whole.append(pages, step, True) for pages, step in zip(tables, asked, strict=True)][:2]
    results = {}
    for first, end in ((0, 2), (2, 5), (5, layers)):
        for key, (pages, step) in enumerate(zip(tables, asked, strict=True)):
            if key < 2 or not first:
                part = ReadPart(key, range(first, end))
                results[key] = parts.append(pages, step, True, None, part)
    parts.forget_read(2)
    parts.forget_read(7)
    assert not parts._begun
    for key, result in enumerate(expected):
        assert result.logits_V is not None and torch.equal(results[key].logits_V, result.logits_V)
        assert results[key].blocks == result.blocks
    for side, other in zip(whole.cache.sides, parts.cache.sides, strict=True):
        assert torch.equal(side[:, :29], other[:, :29])


def test_recomputing_in_layer_parts_equals_one_pass_bit_for_bit(tiny_stack: LayerStack) -> None:
    """Two requests take turns."""
    whole, parts = make_runner(tiny_stack), make_runner(tiny_stack)
    chance, layers = random.Random(6), tiny_stack.layers.stop
    ids = [chance.randrange(198) for _ in range(3 * BLOCK)]
    question = Read(len(ids), array("I", [chance.randrange(198) for _ in range(30)]))
    tables = [tuple(range(30 * n, 30 * n + 26)) for n in range(2)]
    chosen = [(0, 2), (1,)]
    for runner, pages in itertools.product((whole, parts), tables):
        runner.append(pages, Read(0, array("I", reversed(ids))), last=False)  # which is recomputed
    again = [[token for b in blocks for token in ids[b * BLOCK : (b + 1) * BLOCK]] for blocks in chosen]
    calls = list(zip(tables, chosen, again, strict=True))
    expected = [whole.recompute(*call, question, True) for call in calls]
    for first, end in ((0, 1), (1, 4), (4, layers)):
        found = [
            parts.recompute(*call, question, True, ReadPart(key, range(first, end)))
            for key, call in enumerate(calls)
        ]
    for result, wanted in zip(found, expected, strict=True):
        assert wanted.logits_V is not None and torch.equal(result.logits_V, wanted.logits_V)
        assert result.blocks == wanted.blocks
    for side, other in zip(whole.cache.sides, parts.cache.sides, strict=True):
        assert torch.equal(side[:, :60], other[:, :60])
    assert not parts._begun
