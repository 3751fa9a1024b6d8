"""Times only the GEMMs of a prompt's linear layers, one after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from deltafront.kernels.constants import BLOCK
from deltafront.workers.model.directory.model_config import ModelConfig


def products_s(
    shape: ModelConfig, tokens: int, chunk: int, device: torch.device, dtype: torch.dtype, repeats: int
) -> float:
    """Return the median seconds of all layers' GEMMs for a prompt in chunks. As in a stage, the last layer
    runs only its first GEMM, except for the prompt's last block.

    All layers share one layer's weights, which are several times larger than L2. Weights are random numbers,
    because a GPU multiplies zeros faster.
    """
    every = list(products(shape, tokens, chunk))
    weights = {one[1:]: _draw(*one[1:], device, dtype) for one in set(every)}
    inputs = {(rows, width): _draw(rows, width, device, dtype) for rows, _, width in set(every)}

    def prompt() -> None:
        for rows, out, width in every:
            F.linear(inputs[rows, width], weights[out, width])

    _timed(prompt, device)
    return statistics.median(_timed(prompt, device) for _ in range(repeats))


def products(shape: ModelConfig, tokens: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Yield rows, output width and input width of each GEMM, in the order of a stage."""
    for start in range(0, tokens, chunk):
        rows = min(chunk, tokens - start)
        for layer in range(1, shape.layers + 1):
            first, *others = matrices(shape.of_layer(layer - 1))
            yield rows, *first
            last = tokens - (tokens - 1) // BLOCK * BLOCK if start + rows == tokens else 0
            wanted = rows if layer < shape.layers else min(last, rows)
            yield from ((wanted, out, width) for out, width in others if wanted)


def matrices(shape: ModelConfig) -> list[tuple[int, int]]:
    """Return output and input widths of a layer's GEMMs: QKV, attention output, gate with up, and down. A
    token's experts count as one MLP of their total width."""
    inner, mixture = shape.intermediate, shape.mixture
    if mixture is not None:
        inner = inner * mixture.per_token + mixture.shared_width
    queries, keys = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return [
        (queries + 2 * keys, shape.hidden),
        (shape.hidden, queries),
        (2 * inner, shape.hidden),
        (shape.hidden, inner),
    ]


def _draw(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, width, device=device, dtype=dtype).mul_(width**-0.5)


@torch.inference_mode()
def _timed(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
