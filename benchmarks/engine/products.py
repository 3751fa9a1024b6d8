"""The linear products of a prompt alone: what projections would take if nothing were between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from deltafront.workers.model.config import ModelConfig


def products_s(
    shape: ModelConfig, tokens: int, chunk: int, device: torch.device, dtype: torch.dtype, repeats: int
) -> float:
    """Median seconds of all layers' products for a prompt cut into chunks, with nothing between them; of the
    last layer only the first product, but for the last chunk, as a stage has it.

    One layer's weights serve all: they are several times what L2 holds. Random numbers, since a GPU
    multiplies zeros faster.
    """
    sizes = [chunk] * (tokens // chunk) + [tokens % chunk] * (tokens % chunk > 0)
    weights = [_draw(out, width, device, dtype) for out, width in matrices(shape)]
    inputs = {
        (rows, width): _draw(rows, width, device, dtype)
        for rows in set(sizes)
        for _, width in matrices(shape)
    }

    def prompt() -> None:
        for number, rows in enumerate(sizes, 1):
            for layer in range(1, shape.layers + 1):
                short = layer == shape.layers and number < len(sizes)
                for weight_OI in weights[:1] if short else weights:
                    F.linear(inputs[rows, weight_OI.shape[1]], weight_OI)

    _timed(prompt, device)
    return statistics.median(_timed(prompt, device) for _ in range(repeats))


def matrices(shape: ModelConfig) -> list[tuple[int, int]]:
    """Output and input widths of a layer's products: query, key and value; output; gate and up; down."""
    queries, keys = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return [
        (queries + 2 * keys, shape.hidden),
        (shape.hidden, queries),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
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
