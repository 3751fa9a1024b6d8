"""Decodes a batch with DELTA's page selection, with the attention of a decode worker's steps.

Shape suffixes are defined in `answering` and `workers.decode.decode_attention`.
"""

from __future__ import annotations

import torch

from deltafront.workers.decode.decode_attention import (
    BatchRows,
    LayerPlan,
    StepAttention,
    plan_layers,
)
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.messages.requests import PageSelection
from deltafront.workers.model.decoder.stack import Attend, LayerStack
from deltafront.workers.settings import DecodeConfig


def delta_plan(stack: LayerStack, config: DecodeConfig) -> LayerPlan:
    """Raises PageSelectionError if the model has no such layers, or the configuration names no Δ-layer."""
    model = stack.config
    plan = plan_layers(config, model.layers, model.windows, model.linear_layers)
    plan.selects_pages(PageSelection.DELTA, "")
    return plan


def share_read(plan: LayerPlan, kv_layers: int, tokens: int) -> float:
    """Return the share of all KV pages that a decode step of a request of `tokens` tokens reads.

    Args:
        kv_layers: The number of layers with pages.
    """
    read, held = plan.pages_read(tokens, selects=True)
    every = kv_layers * pages_for(tokens)
    return (every - held + read) / every


class PagedSteps:
    """The KV of a batch in pages, in a copy that decode steps extend.

    k_LBGSD, v_LBGSD: The batch's KV cache after prefill, L the layers with attention.
    """

    def __init__(
        self, stack: LayerStack, plan: LayerPlan, k_LBGSD: torch.Tensor, v_LBGSD: torch.Tensor
    ) -> None:
        _layers, batch, heads, room, dim = k_LBGSD.shape
        layers = stack.config.attention_layers(stack.layers)
        self._plan, self._sinks = plan, stack.sinks
        self._pages, self._scale = pages_for(room), dim**-0.5
        pages = batch * self._pages
        self._cache = PagedKVCache(layers, heads, dim, pages, stack.dtype, stack.device)
        self._table_BP = torch.arange(pages, dtype=torch.int32, device=stack.device).view(batch, -1)
        for index, layer in enumerate(layers):
            for paged_RGD, x_LBGSD in zip(self._cache.rows(layer), (k_LBGSD, v_LBGSD), strict=True):
                paged_RGD.view(batch, -1, heads, dim)[:, :room] = x_LBGSD[index].transpose(1, 2)

    def attend(self, positions_B: torch.Tensor) -> Attend:
        """Return the attention of one step, which appends a token to each sample at its position."""
        lengths_B = (positions_B + 1).to(torch.int32)
        step = StepAttention(
            self._plan, BatchRows(self._table_BP, lengths_B, torch.ones_like(lengths_B)), self._scale
        )
        rows_B = torch.arange(len(positions_B), device=positions_B.device) * self._pages * PAGE_TOKENS
        rows_B = rows_B + positions_B

        def attend(layer: int, q_BHD: torch.Tensor, k_BGD: torch.Tensor, v_BGD: torch.Tensor) -> torch.Tensor:
            k_RGD, v_RGD = self._cache.rows(layer)
            k_RGD[rows_B], v_RGD[rows_B] = k_BGD, v_BGD
            return step.attend(layer, q_BHD, *self._cache.layer(layer), sink_H=self._sinks(layer))

        return attend
