"""CUDA graphs of a decode step's forward pass, captured before the first request and replayed from then on.

A step is launched in one call, whatever its layers are. Every graph reads and writes the same memory
(`rows.StepRows`, the pages, the weights), so that requests come and go without capture. Shape suffixes as in
`runner.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .rows import Batch, BatchShape


class StepGraphs:
    """One graph for each of `batches`, which must be all shapes that are ever asked for.

    forward: what is captured, logits_RV of a batch. Call it where nothing else uses the GPU from this
    thread: each shape is computed once before it is captured, so that kernels are compiled and loaded. The
    graphs share one pool of memory, since they never run at the same time. Raises RuntimeError where a
    capture fails.
    """

    def __init__(self, forward: Callable[[Batch], torch.Tensor], batches: Iterable[Batch]) -> None:
        self._graphs: dict[BatchShape, tuple[Any, torch.Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        for batch in sorted(batches, key=lambda batch: batch.shape.cells, reverse=True):
            forward(batch)
            graph = torch.cuda.CUDAGraph()
            # Other threads of this process may go on allocating: they are not part of the graph.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits_RV = forward(batch)
            self._graphs[batch.shape] = graph, logits_RV

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, batch: Batch) -> torch.Tensor:
        """logits_RV, which the next replay overwrites. Raises KeyError for a shape that was not captured."""
        graph, logits_RV = self._graphs[batch.shape]
        graph.replay()
        return logits_RV
