"""Compares and times a pair of kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from deltafront.benchmarks.harness import BenchConfig
from deltafront.tests.numerics import assert_rows_close

CALLS, REPLAYS = 16, 12
"""Calls in a CUDA graph, and timed replays of the graph."""
_ROTATED_BYTES = 512 << 20
CONFIG = BenchConfig(device=torch.device("cuda"))

Run = Callable[[int], object]
"""Calls a kernel on the copy of the inputs with this number."""


@dataclass(frozen=True)
class Pair:
    """One operation, by our kernel and by FlashInfer's.

    Attributes:
        copies: Number of copies of the inputs.
        compare: Returns the largest difference of the outputs. Raises AssertionError if it exceeds rounding.
            None: compare the outputs of one call.
    """

    op: str
    shape: str
    ours: Run
    theirs: Run
    copies: int
    compare: Callable[[], float] | None = None


@dataclass(frozen=True)
class Measured:
    op: str
    shape: str
    ours_us: float
    flashinfer_us: float
    ratio: float
    difference: float


def copies_of(size: int) -> int:
    """Return the number of copies of `size` bytes, 2 to 16, that together exceed L2."""
    return max(2, min(CALLS, -(-_ROTATED_BYTES // size)))


def close(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference. Raises AssertionError if a row exceeds its dtype's tolerance."""
    assert_rows_close(actual, expected)
    return float((actual.float() - expected.float()).abs().max())


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=CONFIG.device, dtype=CONFIG.dtype)


def _same(ours: Run, theirs: Run) -> float:
    """Compare the outputs of one call. Our kernel runs first, because FlashInfer's may write in place."""
    pairs = zip(copied(ours(0)), copied(theirs(0)), strict=True)
    return max(close(actual, expected) for actual, expected in pairs)


def copied(made: object) -> list[torch.Tensor]:
    found = [made] if isinstance(made, torch.Tensor) else list(made)  # type: ignore[call-overload]
    return [x.clone() for x in found]


def measure(pair: Pair) -> Measured:
    """Compare both kernels, then time them alternately, twice each. Keep the lower median of each."""
    difference = (pair.compare or partial(_same, pair.ours, pair.theirs))()
    graphs = [_graph(run, pair.copies) for run in (pair.ours, pair.theirs)]
    rounds = [[_replay_us(graph) for graph in graphs] for _ in range(2)]
    ours, theirs = (min(times) for times in zip(*rounds, strict=True))
    return Measured(pair.op, pair.shape, ours, theirs, theirs / ours, difference)


def _graph(run: Run, copies: int) -> torch.cuda.CUDAGraph:
    for i in range(copies):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's thread queries events, which fails during another thread's capture in the default mode.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in range(CALLS):
            run(call % copies)
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Return a replay's median microseconds per call. All replays are queued before the host waits."""
    event: Any = torch.cuda.Event  # untyped in torch
    marks = [event(enable_timing=True) for _ in range(REPLAYS + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    spans = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
    return float(1000 * statistics.median(spans) / CALLS)
