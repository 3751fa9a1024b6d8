"""Tests one stage without a controller: commands, reports, failures, phases, pages and abandoned requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from deltafront.kernels.methods import MethodSpec
from deltafront.tests.numerics import assert_rows_close
from deltafront.tests.workers.in_process import InProcessSender
from deltafront.workers.kv.handoff.protocols import HandoffError
from deltafront.workers.messages.stages import (
    ChunkCommand,
    ChunkReport,
    HandoffFailed,
    OpenRequest,
    RequestFailed,
)
from deltafront.workers.prefill.stage import stage as prefill_stage
from deltafront.workers.prefill.stage.chunk import ChunkAttention
from deltafront.workers.prefill.stage.phases import PhaseTimer
from deltafront.workers.prefill.stage.stage import PrefillStage, load_stage
from deltafront.workers.settings import ModelSpec, PrefillConfig
from deltafront.workers.tracing import NO_TRACER, Tracer

from ..tiny_model import LAYERS, random_ids
from .test_prefill_stage import DENSE, SPARSE, Collector


def stage_of(model: ModelSpec, sink: Collector, tracer: Tracer = NO_TRACER) -> PrefillStage:
    config = PrefillConfig(stages=1, cache_tokens=1024)
    return load_stage(model, config, 0, None, lambda _cache: InProcessSender(sink), tracer=tracer)


def opening(
    name: str, pages: Iterable[int], tokens: int, method: MethodSpec = DENSE, serial: int = 0
) -> OpenRequest:
    return OpenRequest(
        request_id=name,
        pages=tuple(pages),
        prompt_tokens=tokens,
        method=method,
        decode_worker="decode:x",
        serial=serial,
    )


def chunk(name: str, token_ids: bytes, start: int = 0, last: bool = True) -> ChunkCommand:
    return ChunkCommand(
        request_id=name,
        start=start,
        tokens=len(token_ids) // 4,
        last=last,
        wants_logits=True,
        token_ids=token_ids,
    )


def run_chunk(stage: PrefillStage, command: ChunkCommand) -> ChunkReport:
    (outcome,) = stage.run_batch([command])()
    if isinstance(outcome, RequestFailed):
        raise outcome
    return outcome


def test_stage_refuses_unopened_requests_and_closes_failed_ones(model: ModelSpec) -> None:
    stage = stage_of(model, Collector())
    command = chunk("r", random_ids(128), last=False)
    with pytest.raises(RequestFailed, match="r is not open"):
        run_chunk(stage, command)
    stage.open(opening("r", range(40, 49), 130))
    assert stage.pages_used() == 9
    report = run_chunk(stage, command)
    assert sum(report.phases.values()) <= report.wall
    assert (report.stage, report.start, report.request_id) == (0, 0, "r")
    with pytest.raises(RequestFailed, match="token ids"):
        run_chunk(stage, replace(command, start=128, token_ids=b""))
    assert stage.pages_used() == 0, "a request that failed is closed"
    stage.close("r")
    stage.close("unknown")


def test_failed_kv_hand_off_is_reported_as_such(model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise HandoffError("K/V of r is lost")

    stage = stage_of(model, Collector())
    stage.open(opening("r", range(40, 49), 130))
    monkeypatch.setattr(stage._streams["r"], "end_chunk", lambda: lost)
    with pytest.raises(HandoffFailed, match="K/V of r is lost"):
        run_chunk(stage, chunk("r", random_ids(128), last=False))


@pytest.mark.parametrize("method", [DENSE, SPARSE], ids=lambda m: m.name)
def test_scattered_pages_give_the_same_output_as_contiguous_ones(
    model: ModelSpec, method: MethodSpec
) -> None:
    """Contiguous pages are read in place, scattered pages are gathered. Also for both kinds at once."""
    sink, ids = Collector(), random_ids(300)
    stage = stage_of(model, sink)
    scattered = (60, *range(40, 50), *range(21, 29))
    for name, pages in (("run", range(1, 20)), ("scattered", scattered)):
        stage.open(opening(name, pages, 300, method))
    for start, end in ((0, 128), (128, 256), (256, 300)):
        part = ids[4 * start : 4 * end]
        for name in ("run", "scattered"):
            run_chunk(stage, chunk(name, part, start, last=end == 300))
    assert_rows_close(*(torch.from_numpy(sink.logits[name])[None] for name in ("run", "scattered")))
    for name in ("run", "scattered"):
        stage.close(name)


@pytest.mark.parametrize("method", [DENSE, SPARSE], ids=lambda m: m.name)
def test_overflow_at_one_token_fails_the_request(model: ModelSpec, method: MethodSpec) -> None:
    sink, ids = Collector(), random_ids(300)
    stage = stage_of(replace(model, dtype="float16"), sink)
    token = int(np.frombuffer(ids, dtype="<u4")[70])
    stage.stack._weights.embedding_VC[token] *= 1e7  # beyond float16's maximum, 65,504
    stage.open(opening("r", range(19), 300, method))
    with pytest.raises(RequestFailed, match=r"not finite numbers in torch\.float16"):
        run_chunk(stage, chunk("r", ids))
    assert not sink.logits
    stage.close("r")
    assert stage.pages_used() == 0


def test_projection_phase_covers_all_linear_layers_but_no_attention(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[list[str]] = []
    attended: list[list[str]] = []

    class Phases(PhaseTimer):
        @contextmanager
        def phase(self, name: str) -> Iterator[None]:
            inside.append(name)
            with super().phase(name):
                yield
            inside.pop()

    class Products(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.linear:
                products.append(list(inside))
            return func(*args, **(kwargs or {}))

    def attend(self: ChunkAttention, *arguments: Any) -> torch.Tensor:
        attended.append(list(inside))
        return original(self, *arguments)

    original, inside = ChunkAttention.attend, list[str]()
    monkeypatch.setattr(ChunkAttention, "attend", attend)
    monkeypatch.setattr(prefill_stage, "phase_timer", lambda _device: Phases())
    stage = stage_of(model, Collector())
    stage.open(opening("r", range(8), 128))
    with Products():
        run_chunk(stage, chunk("r", random_ids(128)))
    assert products == [["projection"]] * (4 * LAYERS + 1)
    assert attended == [[]] * LAYERS


def test_cancelled_chunk_stops_at_the_next_layer(model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of(model, Collector())
    written: list[int] = []
    view = stage._cache.view_run

    def abandoning(layer: int, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        written.append(layer)
        if layer == 2:
            stage.abandon(7)
        return view(layer, *rest)

    monkeypatch.setattr(stage._cache, "view_run", abandoning)
    command, order = chunk("r", random_ids(128)), opening("r", range(8), 128, serial=7)
    stage.open(order)
    with pytest.raises(RequestFailed, match="abandoned"):
        run_chunk(stage, command)
    assert written == [0, 1, 2]
    assert stage.pages_used() == 0 and not stage._abandoned
    stage.close("r")
    stage.abandon(7)  # too late: a later request with the same id has another serial
    stage.open(replace(order, serial=8))
    run_chunk(stage, command)
    assert written[3:] == list(range(LAYERS))
    stage.close("r")
