"""Which layers should be Δ-layers: those where attention moves to other tokens (DELTA, its calibration).

A sparse layer reads the pages that the Δ-layer before it chose, so a Δ-layer belongs where the attention
map differs most from the previous layer's: change = 1 - cos of the two maps, averaged over queries. The map
of a query is what selection looks at: for each token the largest attention weight over the heads.

Shape suffixes: L layers, Q queries looked at, S keys, T tokens, H query heads, G key/value heads, D head
dimension, J = H / G.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from ..kernels.build import build
from ..kernels.interface import AttentionInput, StateSpec
from ..kernels.methods import resolve
from .model import LayerStack, load_stack
from .model_config import ModelConfig

QUERIES = 64
"""Queries of a text whose maps are compared, evenly spaced over its second half."""


def calibrate(
    directory: str | Path,
    config: ModelConfig,
    text_ids: Sequence[int],
    count: int,
    *,
    full_layers: Collection[int] = (0, 1),
    adapter: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[int, ...]:
    """`count` Δ-layers for a model, from one dense pass over a text (a few thousand tokens of real prose).

    Raises ModelError for a model that cannot be loaded, ValueError for too short a text or too large a
    count.
    """
    stack = load_stack(
        directory,
        config,
        range(config.layers),
        embedding=True,
        head=True,
        dtype=dtype,
        device=device,
        adapter=adapter,
    )
    return choose(changes(attention_maps(stack, text_ids)), count, full_layers)


@torch.inference_mode()
def attention_maps(stack: LayerStack, text_ids: Sequence[int], queries: int = QUERIES) -> torch.Tensor:
    """maps_LQS: weight of each key for each query looked at, the largest over the heads (fp32, CPU)."""
    tokens = len(text_ids)
    if tokens < 2 * queries:
        raise ValueError(f"{tokens} tokens are too few to calibrate on: give at least {2 * queries}")
    positions_Q = torch.linspace(tokens // 2, tokens - 1, queries).long().to(stack.device)
    dense, maps = build(resolve("dense")), []

    def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
        maps.append(_largest_weights(q_THD, k_TGD, positions_Q).cpu())
        q_BHTD, k_BGSD, v_BGSD = (x.transpose(0, 1)[None].contiguous() for x in (q_THD, k_TGD, v_TGD))
        spec = StateSpec(1, q_THD.shape[1], k_TGD.shape[1], q_THD.shape[2], tokens, q_THD.device, q_THD.dtype)
        out_BHTD, _coverage = dense.attend(AttentionInput.of(q_BHTD, k_BGSD, v_BGSD), dense.new_state(spec))
        return out_BHTD[0].transpose(0, 1)

    ids_T = torch.tensor(text_ids, dtype=torch.int64, device=stack.device)
    stack.forward(stack.embed(ids_T), torch.arange(tokens, device=stack.device), attend)
    return torch.stack(maps)


def _largest_weights(q_THD: torch.Tensor, k_SGD: torch.Tensor, positions_Q: torch.Tensor) -> torch.Tensor:
    """map_QS of one layer."""
    tokens, kv_heads, head_dim = k_SGD.shape
    q_GJQD = q_THD[positions_Q].float().reshape(len(positions_Q), kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    logits_GJQS = q_GJQD @ k_SGD.float().permute(1, 2, 0)[:, None] * head_dim**-0.5
    future_QS = torch.arange(tokens, device=k_SGD.device) > positions_Q[:, None]
    weights_GJQS = logits_GJQS.masked_fill(future_QS, float("-inf")).softmax(-1)
    return weights_GJQS.amax((0, 1))


def changes(maps_LQS: torch.Tensor) -> tuple[float, ...]:
    """How much each layer's map differs from the one before: mean over queries of 1 - cos; 0 for layer 0."""
    cos_LQ = torch.cosine_similarity(maps_LQS[1:], maps_LQS[:-1], dim=-1)
    return (0.0, *(1.0 - cos_LQ.double().mean(1)).tolist())


def choose(change: Sequence[float], count: int, full_layers: Collection[int]) -> tuple[int, ...]:
    """The layers with the largest change, one in each of `count` equal parts of the depth.

    The parts cover the layers after the leading run of full ones, so that no stretch of sparse layers is
    longer than two parts. The last layer is left out: nothing after it would use its selection.
    """
    last = len(change) - 1
    first = next((layer for layer in range(last) if layer not in full_layers), last)
    free = last - first
    if not 1 <= count <= free:
        raise ValueError(f"{count} Δ-layers cannot be chosen among {free} layers")
    edges = [first + part * free // count for part in range(count + 1)]
    chosen = []
    for start, stop in pairwise(edges):
        part = [layer for layer in range(start, stop) if layer not in full_layers]
        if part:
            chosen.append(max(part, key=change.__getitem__))
    return tuple(chosen)
