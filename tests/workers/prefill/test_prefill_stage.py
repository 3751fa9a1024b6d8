"""Tests stages in one process: with any split into stages and chunks they compute what the whole model
computes at once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltafront.kernels.build import build
from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.methods import MethodSpec, method_spec
from deltafront.tests.numerics import assert_rows_close, row_errors
from deltafront.tests.workers.in_process import DeviceKV, local_controller
from deltafront.workers.messages.events import PrefillDone
from deltafront.workers.messages.requests import PrefillFailed, PrefillJob
from deltafront.workers.messages.stages import (
    ChunkCommand,
    FirstLogits,
    KVAnnouncement,
)
from deltafront.workers.model.decoder.load import torch_dtype
from deltafront.workers.prefill.group.controller import PrefillController
from deltafront.workers.prefill.stage import chunk as chunk_module
from deltafront.workers.prefill.stage import stage as prefill_stage
from deltafront.workers.prefill.stage.chunk import ChunkAttention
from deltafront.workers.prefill.stage.stage import PrefillStage
from deltafront.workers.settings import ModelSpec, PrefillConfig

from ..tiny_model import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, random_ids, whole_prompt

DENSE = method_spec("dense")
SPARSE = method_spec("xattention+delta", {"min_tokens": 0, "tau": 0.8})
ANCHORS = method_spec("dpxa", {"min_tokens": 0, "tau": 0.8})


class Collector:
    """Keeps all KV and logits that a stage sends. `refuse` names a request whose KV it refuses."""

    def __init__(self, refuse: str = "") -> None:
        self.refuse = refuse
        self.kv: dict[tuple[str, int], list[KVAnnouncement]] = defaultdict(list)
        self.logits: dict[str, np.ndarray[Any, Any]] = {}

    def announce(self, announcement: KVAnnouncement) -> None:
        if announcement.request_id == self.refuse:
            raise ValueError("not mine")
        for n in range(announcement.layers):
            self.kv[announcement.request_id, announcement.layer + n].append(announcement)

    def first_logits(self, message: FirstLogits) -> None:
        self.logits[message.request_id] = message.logits

    async def joined(
        self, request_id: str, layer: int, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, ...]:
        """Return k_TGD and v_TGD of the whole prompt. Announcements must arrive in order and without gaps."""
        parts, end = [], 0
        for announcement in self.kv[request_id, layer]:
            assert announcement.start == end
            end += announcement.tokens
            kv = announcement.payload
            assert isinstance(kv, DeviceKV)
            k_TGD, v_TGD = kv.sides_T
            assert k_TGD.dtype is v_TGD.dtype is dtype
            assert k_TGD.shape == v_TGD.shape == (announcement.tokens, KV_HEADS, HEAD_DIM)
            parts.append((k_TGD, v_TGD))
        return tuple(torch.cat(side) for side in zip(*parts, strict=True))


@asynccontextmanager
async def pipeline(model: ModelSpec, sink: Collector, **options: Any) -> AsyncIterator[PrefillController]:
    more = {name: options.pop(name) for name in ("batch_tokens", "kv_dtype") if name in options}
    config = PrefillConfig(**{"chunk_tokens": 128, "cache_tokens": 2048, "stream_lease_s": 600.0, **options})
    controller = local_controller(model, config, sink, **more)
    try:
        yield controller
    finally:
        await controller.stop()


async def prefill(controller: PrefillController, name: str, ids: bytes, method: MethodSpec = DENSE) -> Any:
    events = [
        event
        async for event in controller.prefill(
            PrefillJob(request_id=name, token_ids=ids, method=method, decode_worker="decode:x")
        )
    ]
    assert isinstance(events[-1], PrefillDone)
    return events[-1].report


async def assert_whole(sink: Collector, name: str, model: ModelSpec, ids: bytes, method: MethodSpec) -> None:
    """Check that logits and every layer's KV equal those of the prompt computed at once."""
    logits_V, kv = whole_prompt(Path(model.path), ids, method)
    assert_rows_close(torch.from_numpy(sink.logits[name])[None], logits_V[None])
    for layer in range(LAYERS):
        for got, wanted in zip(await sink.joined(name, layer), kv[layer], strict=True):
            assert_rows_close(got, wanted)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("chunk", [128, 384])
@pytest.mark.parametrize("method", [DENSE, SPARSE], ids=lambda m: m.name)
async def test_logits_and_kv_in_chunks_equal_those_of_the_whole_prompt(
    model: ModelSpec, stages: int, chunk: int, method: MethodSpec
) -> None:
    ids, sink = random_ids(500), Collector()
    async with pipeline(model, sink, stages=stages, chunk_tokens=chunk) as controller:
        report = await prefill(controller, "r", ids, method)
    await assert_whole(sink, "r", model, ids, method)
    assert [density.layer for density in report.density] == list(range(LAYERS))
    if method is DENSE:
        assert all(density.computed == density.causal == 4 * 10 for density in report.density[:-1])
        assert report.density[-1].computed == report.density[-1].causal == 4 * 4, "the last chunk's block"
    attention = sum(phases["attention"] for phases in report.stages)
    assert sum(layer.attention for layer in report.density) == pytest.approx(attention)
    assert all(layer.attention > 0 for layer in report.density), "each has its own"
    assert report.handoff_bytes == 500 * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    assert sum(report.critical.values()) == pytest.approx(report.wall, abs=1e-9)
    assert {"projection", "attention", "kv_gather", "handoff"} <= set(report.critical)
    assert ("activation_wait" in report.critical) == (stages > 1)


@pytest.mark.parametrize(
    ("chunk", "step", "blocks"),
    [
        (128, 0, 1 + 2 + 3 + 4),
        (128, 256, 1 + 3 + 4),
        (128, 128, 4),
        (256, 128, 4),
        (256, 384, 1 + 2 + 4),
        (512, 256, 3 + 4),
        (512, 128, 4),
    ],
)
@pytest.mark.parametrize("method", [DENSE, SPARSE, ANCHORS], ids=lambda m: m.name)
async def test_last_layer_computes_only_kv_before_the_last_block(
    model: ModelSpec, method: MethodSpec, chunk: int, step: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Applies if the method can start at multiples of `step`. The output does not change."""
    monkeypatch.setattr(chunk_module, "resume_step", lambda _spec: step)
    ids, sink = random_ids(500), Collector()
    async with pipeline(model, sink, stages=2, chunk_tokens=chunk) as controller:
        report = await prefill(controller, "r", ids, method)
    await assert_whole(sink, "r", model, ids, method)
    assert [density.causal for density in report.density] == [4 * 10] * (LAYERS - 1) + [4 * blocks]


async def test_concurrent_prompts_do_not_affect_each_other(model: ModelSpec) -> None:
    prompts = {"a": random_ids(900, 1), "b": random_ids(130, 2), "c": random_ids(400, 3)}
    methods = {"a": SPARSE, "b": DENSE, "c": SPARSE}
    sink = Collector()
    async with pipeline(model, sink, stages=2) as controller:
        running = [prefill(controller, name, ids, methods[name]) for name, ids in prompts.items()]
        await asyncio.gather(*running)
    for name, ids in prompts.items():
        logits_V, _ = whole_prompt(Path(model.path), ids, methods[name])
        assert_rows_close(torch.from_numpy(sink.logits[name])[None], logits_V[None])


def batches_of(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list to which each stage adds the request ids of its batches."""
    batches, original = list[list[str]](), PrefillStage.run_batch

    def run_batch(self: PrefillStage, commands: Sequence[ChunkCommand]) -> Any:
        batches.append([command.request_id for command in commands])
        return original(self, commands)

    monkeypatch.setattr(PrefillStage, "run_batch", run_batch)
    return batches


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("method", [DENSE, SPARSE], ids=lambda m: m.name)
async def test_prompts_of_a_batch_are_computed_as_if_alone(
    model: ModelSpec, stages: int, method: MethodSpec, kv_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = batches_of(monkeypatch)
    prompts = {name: random_ids(tokens, tokens) for name, tokens in (("b", 130), ("c", 257), ("d", 1))}
    together, alone = Collector(), Collector()
    config = {"stages": stages, "chunk_tokens": 512, "kv_dtype": kv_dtype}
    async with pipeline(model, together, batch_tokens=600, **config) as controller:
        running = [prefill(controller, "first", random_ids(900), method)]
        running += [prefill(controller, name, ids, method) for name, ids in prompts.items()]
        _, *reports = await asyncio.gather(*running)
    assert ["d", "b", "c"] in batches
    async with pipeline(model, alone, **config) as controller:
        expected = [await prefill(controller, name, ids, method) for name, ids in prompts.items()]
    for name, report, wanted in zip(prompts, reports, expected, strict=True):
        assert_rows_close(
            torch.from_numpy(together.logits[name])[None], torch.from_numpy(alone.logits[name])[None]
        )
        assert [(one.layer, one.computed) for one in report.density] == [
            (one.layer, one.computed) for one in wanted.density
        ]
        assert report.handoff_bytes == wanted.handoff_bytes
        assert sum(report.critical.values()) == pytest.approx(report.wall, abs=1e-9)
        if kv_dtype is None:
            for layer in range(LAYERS):
                for got, kv in zip(
                    await together.joined(name, layer), await alone.joined(name, layer), strict=True
                ):
                    assert_rows_close(got, kv)


async def test_request_that_fails_leaves_its_batch_alone(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad token ids fail at the beginning, a kernel in the middle, a refused hand-off at the end."""
    batches, attend = batches_of(monkeypatch), chunk_module.ChunkAttention.attend

    def attended(self: ChunkAttention, layer: int, *rest: Any) -> Any:
        if self.prompt.request.request_id == "attention" and layer == 1:
            raise KernelInputError("no kernel for this layer")
        return attend(self, layer, *rest)

    monkeypatch.setattr(ChunkAttention, "attend", attended)
    bad_ids = np.full(100, VOCAB, dtype=np.uint32).tobytes()
    sink, good = Collector(refuse="refused"), random_ids(140, 5)
    async with pipeline(model, sink, stages=3, chunk_tokens=512, batch_tokens=1000) as controller:
        outcomes = await asyncio.gather(
            prefill(controller, "first", random_ids(1024)),
            prefill(controller, "ids", bad_ids),
            prefill(controller, "attention", random_ids(120)),
            prefill(controller, "refused", random_ids(130)),
            prefill(controller, "good", good),
            return_exceptions=True,
        )
        words = f"vocabulary of {VOCAB}", "no kernel for this layer", "not mine"
        for outcome, message in zip(outcomes[1:4], words, strict=True):
            assert isinstance(outcome, PrefillFailed) and message in str(outcome)
        assert ["ids", "attention", "refused", "good"] in batches
        assert controller.failure == ""
        assert await controller.stage_pages() == [0, 0, 0]
    logits_V, _ = whole_prompt(Path(model.path), good, DENSE)
    assert_rows_close(torch.from_numpy(sink.logits["good"])[None], logits_V[None])


async def test_abandoned_request_leaves_its_batch_alone(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, attend = batches_of(monkeypatch), ChunkAttention.attend
    attended: list[tuple[str, int]] = []

    def attending(self: ChunkAttention, layer: int, *rest: Any) -> Any:
        attended.append((self.prompt.request.request_id, layer))
        if attended[-1] == ("left", 0):
            self._abandoned = lambda: True
        return attend(self, layer, *rest)

    monkeypatch.setattr(ChunkAttention, "attend", attending)
    sink, good = Collector(), random_ids(140, 5)
    async with pipeline(model, sink, stages=1, chunk_tokens=512, batch_tokens=1000) as controller:
        _, outcome, _ = await asyncio.gather(
            prefill(controller, "first", random_ids(1024)),
            prefill(controller, "left", random_ids(100)),
            prefill(controller, "good", good),
            return_exceptions=True,
        )
    assert ["left", "good"] in batches
    assert isinstance(outcome, PrefillFailed) and "abandoned" in str(outcome)
    assert [layer for name, layer in attended if name == "left"] == [0]
    logits_V, _ = whole_prompt(Path(model.path), good, DENSE)
    assert_rows_close(torch.from_numpy(sink.logits["good"])[None], logits_V[None])


def break_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(spec: MethodSpec, *more: Any) -> Any:
        if spec.name == "streaming":
            raise KernelInputError("no kernel for this device")
        return build(spec, *more)

    monkeypatch.setattr(prefill_stage, "build", broken)


async def test_failed_request_leaves_the_stages_in_step(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad token ids fail on the first stage, a bad method fails at `open`, and a refused hand-off fails at a
    chunk's end."""
    break_streaming(monkeypatch)
    bad_ids = np.full(600, VOCAB, dtype=np.uint32).tobytes()
    sink = Collector(refuse="refused")
    good = random_ids(700, 5)
    async with pipeline(model, sink, stages=3) as controller:
        outcomes = await asyncio.gather(
            prefill(controller, "good", good),
            prefill(controller, "ids", bad_ids),
            prefill(controller, "refused", random_ids(300)),
            prefill(controller, "method", random_ids(300), method_spec("streaming")),
            return_exceptions=True,
        )
        assert isinstance(outcomes[1], PrefillFailed) and f"vocabulary of {VOCAB}" in str(outcomes[1])
        assert isinstance(outcomes[2], PrefillFailed) and "not mine" in str(outcomes[2])
        assert isinstance(outcomes[3], PrefillFailed)
        assert "streaming cannot start: no kernel for this device" in str(outcomes[3])
        assert controller.failure == ""
        assert await controller.stage_pages() == [0, 0, 0]
        await prefill(controller, "again", good)
    logits_V, _ = whole_prompt(Path(model.path), good, DENSE)
    for name in ("good", "again"):
        assert_rows_close(torch.from_numpy(sink.logits[name])[None], logits_V[None])


async def test_prompt_after_a_cancelled_one_is_computed_correctly(model: ModelSpec) -> None:
    ids, sink = random_ids(500, 9), Collector()
    async with pipeline(model, sink, stages=2, cache_tokens=512) as controller:
        for _ in range(4):
            stream = controller.prefill(
                PrefillJob(request_id="x", token_ids=random_ids(512), method=DENSE, decode_worker="decode:x")
            )
            await anext(stream)
            await stream.aclose()
            assert await controller.stage_pages() == [0, 0]
        await prefill(controller, "r", ids)
        assert (await controller.stats()).pages_free == 32
    logits_V, _ = whole_prompt(Path(model.path), ids, DENSE)
    assert_rows_close(torch.from_numpy(sink.logits["r"])[None], logits_V[None])


async def test_broken_stage_ends_the_group_without_hanging(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PrefillStage._compute

    def compute(self: PrefillStage, chunks: Sequence[ChunkAttention], *rest: Any) -> Any:
        if self._stage == 1 and chunks[0].work.command.start == 128:
            raise RuntimeError("an illegal memory access")
        return original(self, chunks, *rest)

    monkeypatch.setattr(PrefillStage, "_compute", compute)
    async with pipeline(model, Collector(), stages=3) as controller:
        running = [prefill(controller, name, random_ids(600)) for name in "ab"]
        outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 60)
        assert {str(error) for error in outcomes} == {"prefill group local is lost: an illegal memory access"}


def test_refuses_an_unknown_dtype_by_name() -> None:
    with pytest.raises(ValueError, match="'int8' is unknown"):
        torch_dtype(ModelSpec(path="x", dtype="int8"))


async def on_the_cpu(model: ModelSpec, sink: Collector, ids: bytes) -> None:
    async with pipeline(model, sink, stages=1, chunk_tokens=256) as controller:
        await prefill(controller, "r", ids, DENSE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("method", [DENSE, SPARSE], ids=lambda m: m.name)
def test_cuda_stages_send_the_kv_that_a_cpu_computes(
    model: ModelSpec, stages: int, method: MethodSpec
) -> None:
    """Compares bf16 on the GPU with fp32 on the CPU: hand-off through pinned memory, phases timed by
    events."""
    ids, sink = random_ids(900), Collector()
    half = replace(model, dtype="bfloat16")

    async def run() -> Any:
        async with pipeline(half, sink, stages=stages, chunk_tokens=256, device="cuda") as controller:
            for name in ("warm-up", "r"):
                report = await prefill(controller, name, ids, method)
            assert await controller.stage_pages() == [0] * stages
            return report

    report = asyncio.run(run())
    if method is DENSE:
        # Errors grow from layer to layer of a random model, so they are compared with bf16 on the CPU.
        on_cpu = Collector()
        asyncio.run(on_the_cpu(half, on_cpu, ids))
        logits_V, kv = whole_prompt(Path(model.path), ids, DENSE)
        for layer in range(LAYERS):
            got = asyncio.run(sink.joined("r", layer, torch.bfloat16))
            peer = asyncio.run(on_cpu.joined("r", layer, torch.bfloat16))
            for x, y, wanted in zip(got, peer, kv[layer], strict=True):
                mean, allowed = (row_errors(z.float().cpu(), wanted).mean() for z in (x, y))
                assert mean <= 1.5 * allowed
        mine, theirs = (
            row_errors(torch.from_numpy(c.logits["r"])[None], logits_V[None]) for c in (sink, on_cpu)
        )
        assert mine.item() <= 1.5 * theirs.item()
    assert sum(report.critical.values()) == pytest.approx(report.wall, abs=1e-9)
    assert report.critical["group_overhead"] > 0
