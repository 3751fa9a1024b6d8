"""Tests which decode steps are captured at the start. Stand-ins compute in place of CUDA graphs.

`test_decode_runner.py` tests real CUDA graphs, on a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from deltafront.workers.decode import runner as runner_module
from deltafront.workers.decode.step_rows import Batch, BatchShape
from deltafront.workers.messages.requests import PageSelection, Sampling

pytestmark = pytest.mark.usefixtures("single_rank")


DELTA = {"delta_layers": (1, 3), "full_layers": (0,), "page_budget": 3, "recency": 1}


class Recorder:
    """In place of `StepGraphs`. made: all of them; replayed: the shapes of steps, in order."""

    made: list[Recorder]
    replayed: list[BatchShape]

    def __init__(self, forward: Callable[[Batch], torch.Tensor], batches: Iterable[Batch]) -> None:
        self.made.append(self)
        self._forward = forward
        self.shapes = set()
        for batch in batches:
            assert forward(batch).shape[0] == batch.shape.rows
            self.shapes.add(batch.shape)

    def replay(self, batch: Batch) -> torch.Tensor:
        self.replayed.append(batch.shape)
        return self._forward(batch)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setattr(runner_module, "StepGraphs", Recorder)
    Recorder.made, Recorder.replayed = [], []
    return Recorder


async def test_captures_all_cuda_graphs_at_start_and_none_later(bench: Any, recorder: type[Recorder]) -> None:
    """Requests with and without page selection join and leave. Their answers are the same as without
    graphs."""
    run = await bench(warm_up=True, looks_ahead=True, max_batch=5, cache_tokens=2048, **DELTA)
    (graphs,) = recorder.made
    assert graphs.shapes == {BatchShape(n, 64, selects) for n in (1, 2, 4, 5) for selects in (True, False)}
    del recorder.replayed[:]
    plain = await bench(max_batch=5, **DELTA)
    lengths = [5, 90, 33, 150, 16, 64, 7, 120]
    answers = [
        await asyncio.gather(
            *(
                each.ask(
                    f"r{n}",
                    [(3 * i + n) % 198 for i in range(n)],
                    Sampling(max_tokens=4 + 5 * (n % 4), ignore_eos=True),
                    page_selection=PageSelection.DELTA if n % 2 else PageSelection.FULL,
                )
                for n in lengths
            )
        )
        for each in (run, plain)
    ]
    assert [a.ids for a in answers[0]] == [a.ids for a in answers[1]]
    await run.ask("full", [1, 2, 3], Sampling(max_tokens=4), page_selection=PageSelection.FULL)
    assert {shape.selects for shape in recorder.replayed} == {True, False}
    assert set(recorder.replayed) <= graphs.shapes
    assert recorder.made == [graphs]


async def test_captures_no_page_selection_without_delta_layers(bench: Any, recorder: type[Recorder]) -> None:
    await bench(warm_up=True, looks_ahead=True, max_batch=2, cache_tokens=512)
    (graphs,) = recorder.made
    assert graphs.shapes == {BatchShape(1, 32, False), BatchShape(2, 32, False)}


async def test_failed_cuda_graph_capture_stops_the_start(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(runner_module, "StepGraphs", fail)
    with pytest.raises(RuntimeError, match="capturing"):
        await bench(warm_up=True, looks_ahead=True)
