"""Tests real stages and a real decode engine with 8-bit KV. They answer as a plain model that rounds K and V
in the same way. Covers sessions, recomputed blocks and resumed prompts, with one rank and several."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.layers.kv_int8 import dequantise, quantise
from deltafront.kernels.methods import method_spec
from deltafront.tests.workers.in_process import InProcessReader, local_controller
from deltafront.tests.workers.in_ranks import followers, parts, unused
from deltafront.workers.decode.decode_attention import plan_layers
from deltafront.workers.decode.ranks import LeadRunner, runner_sizes
from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.runner import DecodeRunner, warm_up
from deltafront.workers.decode.step_rows import Row
from deltafront.workers.messages.events import ChunkRead
from deltafront.workers.messages.requests import GenerateJob, KeepSession, Sampling
from deltafront.workers.messages.stages import KVRange
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.prefill.group.controller import PrefillController
from deltafront.workers.settings import DecodeConfig, ModelSpec, PrefillConfig

from .conftest import LAYERS, Bench
from .decode.test_decode_runner import MAX_BATCH, PAGES
from .decode.test_ranks import CONFIG, whole_runner
from .prompts import packed
from .test_resume import CHUNK, IDS, TOKENS, Line, job_of, read
from .tiny_model import make_tiny_model

SAMPLING = Sampling(max_tokens=16, ignore_eos=True)
DOCUMENT = np.frombuffer(IDS, dtype="<u4").tolist()
DENSE = method_spec("dense")
SAME = 0.01
"""Tolerance for logits, whose standard deviation is 1.6. Sums in another order round some values differently,
so that tokens with nearly equal logits may change places."""
IN_8_BITS = replace(CONFIG, kv_dtype="int8")


def rounded(x: torch.Tensor) -> torch.Tensor:
    return dequantise(*quantise(x), x.dtype)


@torch.inference_mode()
def logit_gap(stack: LayerStack, ids: Sequence[int], answer: Sequence[int], *, rounds: bool = True) -> float:
    """Return the largest difference between a plain model's highest logit and its logit of the answer's
    token.

    With `rounds`, the model attends to K and V rounded to 8 bits.
    """

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (rounded(k), rounded(v)) if rounds else (k, v)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    assert len(answer) == SAMPLING.max_tokens
    everything_T = torch.tensor([*ids, *answer[:-1]])
    hidden_TC = stack.forward(stack.embed(everything_T), torch.arange(len(everything_T)), attend)
    logits_AV = stack.logits(hidden_TC[-len(answer) :])
    chosen_A = logits_AV.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return float((logits_AV.amax(1) - chosen_A).max())


@asynccontextmanager
async def group(
    directory: Path, line: Line, stages: int = 2, kv_dtype: Any = "int8"
) -> AsyncIterator[PrefillController]:
    config = PrefillConfig(stages=stages, cache_tokens=1024, chunk_tokens=CHUNK, stream_lease_s=600.0)
    spec = ModelSpec(path=str(directory), dtype="float32")
    made = local_controller(spec, config, line, line, kv_dtype)
    try:
        yield made
    finally:
        await made.stop()


async def started(bench: Callable[..., Any], **config: Any) -> Bench:
    made: Bench = await bench(reader=InProcessReader, kv_dtype="int8", **config)
    return made


async def generate(run: Bench, name: str, **more: Any) -> list[int]:
    return (await run.collect(GenerateJob(request_id=name, sampling=SAMPLING, **more))).ids


async def test_int8_service_answers_as_a_model_with_rounded_kv(
    bench: Callable[..., Any], tiny_llama: Path, tiny_stack: LayerStack
) -> None:
    """Asks a prompt, questions on two sessions that fork from it, and a longer question on the second
    session."""
    run = await started(bench)
    line = Line(run.engine)
    await run.reserve("a", TOKENS, SAMPLING.max_tokens, keep_ttl_s=60.0)
    async with group(tiny_llama, line) as controller:
        await read(controller, job_of("a", DENSE))
    kept = await run.engine.keep(KeepSession(request_id="a"))
    session = kept.session.session_id
    unrounded = []
    for name, question in (("b", DOCUMENT[40:77]), ("c", DOCUMENT[100:205])):
        answer = await run.ask_session(name, session, question, SAMPLING)
        assert logit_gap(tiny_stack, [*DOCUMENT, *question], answer.ids) < SAME
        unrounded.append(logit_gap(tiny_stack, [*DOCUMENT, *question], answer.ids, rounds=False))
    assert max(unrounded) > SAME
    await run.reserve("again", TOKENS, SAMPLING.max_tokens)
    async with group(tiny_llama, line, stages=3) as controller:
        await read(controller, job_of("again", DENSE))
    assert logit_gap(tiny_stack, DOCUMENT, await generate(run, "again")) < SAME


async def test_page_selection_of_all_pages_equals_full_with_int8_kv(
    bench: Callable[..., Any], tiny_llama: Path
) -> None:
    """A page budget that covers all pages attends to the same pages as `full`."""
    run = await started(
        bench, page_selection="delta", full_layers=(0,), delta_layers=(2,), page_budget=64, recency=2
    )
    line, answers = Line(run.engine), []
    async with group(tiny_llama, line) as controller:
        for name in ("delta", "full"):
            await run.reserve(name, TOKENS, SAMPLING.max_tokens, page_selection=name)
            await read(controller, job_of(name, DENSE))
            answers.append(await generate(run, name))
    assert answers[0] == answers[1]


async def test_recomputed_blocks_are_written_in_8_bits(
    bench: Callable[..., Any], tiny_llama: Path, tiny_stack: LayerStack
) -> None:
    """A sparsely prefilled prompt whose blocks are all recomputed gets the answer after dense prefill."""
    run = await started(bench)
    line = Line(run.engine)
    sparse = method_spec("streaming", {"min_tokens": 0, "window": BLOCK})
    blocks = TOKENS // BLOCK
    await run.reserve("a", TOKENS, SAMPLING.max_tokens, recompute_blocks=blocks)
    async with group(tiny_llama, line) as controller:
        await read(controller, job_of("a", sparse))
    answer = await generate(run, "a", prompt_ids=packed(DOCUMENT))
    assert logit_gap(tiny_stack, DOCUMENT, answer) < SAME


async def test_resumed_prompt_has_the_same_kv_and_logits_bit_for_bit(
    bench: Callable[..., Any], tiny_llama: Path
) -> None:
    run = await started(bench)
    line = Line(run.engine)
    for name in ("whole", "resumed"):
        await run.reserve(name, TOKENS, SAMPLING.max_tokens)
    async with group(tiny_llama, line) as controller:
        await read(controller, job_of("whole", DENSE))
        first = await read(controller, job_of("resumed", DENSE), until=4 * CHUNK)
    points = [event.tokens_done for event in first if isinstance(event, ChunkRead)]
    assert await run.engine.resume("resumed", points, 1) == 4 * CHUNK
    async with group(tiny_llama, line, stages=3) as other:
        await read(other, job_of("resumed", DENSE, start=4 * CHUNK, attempt=1))
    assert sum(one.tokens for one in line.fetched) == LAYERS * 4 * CHUNK
    for layer in range(LAYERS):
        held = []
        for name in ("whole", "resumed"):
            kv = await run.engine.kv(KVRange(request_id=name, layer=layer, start=0, tokens=TOKENS))
            assert kv.k.dtype == np.uint8 and [x.dtype for x in kv.scales] == [np.uint8] * 2
            held.append([kv.k, kv.v, *kv.scales])
        assert all(map(np.array_equal, *held))
    assert await generate(run, "whole") == await generate(run, "resumed")


@pytest.mark.parametrize(("stage", "worker"), [(None, "int8"), ("int8", None)])
async def test_kv_of_another_format_fails_the_request(
    bench: Callable[..., Any], tiny_llama: Path, stage: Any, worker: Any
) -> None:
    """Their pairing strings keep them apart. If they met, the request would fail."""
    run = await bench(reader=InProcessReader, kv_dtype=worker)
    await run.reserve("a", TOKENS, SAMPLING.max_tokens)
    line = Line(run.engine)
    async with group(tiny_llama, line, kv_dtype=stage) as controller:
        with pytest.raises(Exception, match=r"did not take KV.*tensors as expected"):
            await read(controller, job_of("a", DENSE))
    answer = await run.collect(GenerateJob(request_id="a", sampling=SAMPLING))
    assert not answer.ids and "did not arrive" in answer.finish.message


@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), [(2, 4, 2), (4, 8, 4), (2, 12, 4)])
def test_ranks_with_int8_kv_equal_one_rank(tmp_path: Path, ranks: int, heads: int, kv_heads: int) -> None:
    """Compares decode steps with and without page selection, appended text and recomputed blocks, from equal
    8-bit KV. Sums over ranks sometimes round a number differently."""
    directory = make_tiny_model(tmp_path, heads=heads, kv_heads=kv_heads)
    alone = whole_runner(directory, IN_8_BITS)
    stacks, ids, pages = parts(directory, ranks), [n * 7 % 198 for n in range(900)], tuple(range(60))
    alone.append(pages, Read(0, ids[:700]), last=False)
    rows = [Row(n, pages, 700, 5 + n, Sampling(), selects) for n, selects in enumerate((False, True))]
    results = []
    with followers(stacks, IN_8_BITS, unused) as others:
        lead = LeadRunner(
            stacks[0], plan_layers(IN_8_BITS, 5), others, **runner_sizes(IN_8_BITS, stacks[0].config)
        )
        caches = [lead.cache, *(other._runner.cache for other in others)]
        for cache in caches:
            for mine, whole in zip(cache.sides, alone.cache.sides, strict=True):
                mine.copy_(whole[:, :, :, cache.heads])
        for runner in (alone, lead):
            steps = [runner.decode([row])[0] for row in rows]
            question = Read(700, ids[700:])
            read = runner.append(pages, replace(question, select_blocks=2, select_among=700), last=True)
            again = [token for b in read.blocks for token in ids[b * BLOCK : (b + 1) * BLOCK]]
            runner.recompute(pages, read.blocks, again, question, last=True)
            results.append((steps, read))
    (steps, read), (our_steps, our_read) = results
    assert [one.token for one in our_steps] == [one.token for one in steps]
    for our, one in zip(our_steps, steps, strict=True):
        assert our.logprob == pytest.approx(one.logprob, abs=SAME)
    assert our_read.blocks == read.blocks and len(read.blocks) == 2
    assert read.logits_V is not None and our_read.logits_V is not None
    assert torch.allclose(our_read.logits_V, read.logits_V, atol=SAME)
    for side in range(4):
        joined = torch.cat([cache.sides[side] for cache in caches], dim=3)
        differs = (joined != alone.cache.sides[side])[:, :60].float().mean()
        assert float(differs) < 0.01


def test_warm_up_runs_with_int8_kv(tiny_stack: LayerStack) -> None:
    config = DecodeConfig(full_layers=(0,), delta_layers=(2,), page_budget=3, recency=1, kv_dtype="int8")
    plan = plan_layers(config, tiny_stack.config.layers)
    sizes = {"pages": PAGES, "max_batch": MAX_BATCH, "max_pages": 20}
    runner = DecodeRunner(tiny_stack, plan, **sizes, kv_dtype=config.kv_dtype)
    warm_up(runner, 300, True)
    assert not runner.cache.k_LPSGD[:, : runner.scratch_page].any(), "only the scratch page is written"
