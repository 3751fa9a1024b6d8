"""The attention of a decode step, with DELTA's page selection (Algorithm 2).

A Δ-layer attends to all pages and scores them: a token's score is its largest attention weight over heads, a
page's score is the sum over its tokens. The sparse layers after it, up to the next Δ-layer, attend only to
the K pages with the highest scores, which always include the last L pages. Other layers attend to all pages.
Pages are selected anew in every step and for each request.

Shape suffixes also: K selected pages, P columns of the page table.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

import torch

from deltafront.kernels.attention.sinks import with_sinks
from deltafront.kernels.layers.kv_int8 import Scales
from deltafront.kernels.paged_decode.dispatch import (
    paged_attention,
    paged_attention_scored,
    paged_attention_sparse,
)
from deltafront.kernels.paged_decode.page_selection import select_pages
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.messages.requests import PageSelection
from deltafront.workers.model.decoder.collectives import SINGLE_RANK, Collectives
from deltafront.workers.settings import DecodeConfig


class PageSelectionError(ValueError):
    """The configuration or the model does not allow a page selection."""


class LayerRole(Enum):
    DENSE = auto()
    SCORING = auto()
    SPARSE = auto()


@dataclass(frozen=True)
class LayerPlan:
    """The role of each layer in page selection.

    Attributes:
        budget: K, the number of pages that a sparse layer attends to.
        recency: L, the number of last pages that are always among the K pages.
        windows: The size in tokens of each layer's sliding window, by layer.
    """

    roles: tuple[LayerRole, ...]
    budget: int
    recency: int
    windows: Mapping[int, int] = field(default_factory=dict)

    @property
    def sparse_layers(self) -> int:
        return self.roles.count(LayerRole.SPARSE)

    def pages_read(self, length: int, selects: bool) -> tuple[int, int]:
        """Return two page counts of one request's decode step, each summed over the sparse layers: pages
        attended to, and pages that hold these layers' KV.

        Args:
            length: Tokens of the request, including the one being computed.
            selects: True if the request selects pages.
        """
        pages = pages_for(length)
        return self.sparse_layers * (
            min(pages, self.budget) if selects else pages
        ), self.sparse_layers * pages

    @property
    def calibrated(self) -> bool:
        return LayerRole.SCORING in self.roles

    def selects_pages(self, page_selection: str, default: str) -> bool:
        """Return whether a request's sparse layers attend only to selected pages.

        Args:
            page_selection: The request's value; empty: `default`.
        Raises:
            PageSelectionError: The value is unknown, or it is `delta` and there is no Δ-layer.
        """
        name = page_selection or default
        if name == PageSelection.FULL:
            return False
        if name != PageSelection.DELTA:
            raise PageSelectionError(f"unknown page selection {name!r}: use 'delta' or 'full'")
        if not self.calibrated:
            raise PageSelectionError(
                "page selection 'delta' needs calibrated delta_layers in the decode configuration: "
                "ask for 'full', or calibrate this model"
            )
        return True


def plan_layers(
    config: DecodeConfig,
    layers: int,
    windows: Mapping[int, int] = MappingProxyType({}),
    linear: Collection[int] = (),
) -> LayerPlan:
    """Choose every layer's role. Raises PageSelectionError with the wrong key.

    Args:
        windows: As in `LayerPlan`.
        linear: Layers with linear attention, which have no pages.
    """
    for problem in (*config.layer_problems(layers, windows, linear), *config.contradictions()):
        raise PageSelectionError(problem)
    first = min(config.delta_layers, default=layers)
    roles = []
    for layer in range(layers):
        if layer in config.delta_layers:
            roles.append(LayerRole.SCORING)
        elif layer in config.full_layers or layer in (*windows, *linear) or layer < first:
            roles.append(LayerRole.DENSE)
        else:
            roles.append(LayerRole.SPARSE)
    return LayerPlan(tuple(roles), config.page_budget, config.recency, windows)


@dataclass(frozen=True)
class BatchRows:
    """The batch of one decode step. Each request is a row.

    Attributes:
        table_RP: Each request's page table.
        lengths_R: Number of tokens of each request, including the one being computed.
        selects_R: int32, 1 for rows that select pages; None if no row does.
        rolling_RP: The page table of layers with windows, if these have rolling buffers; None: `table_RP`.
    """

    table_RP: torch.Tensor
    lengths_R: torch.Tensor
    selects_R: torch.Tensor | None
    rolling_RP: torch.Tensor | None = None


class StepAttention:
    """Computes the attention of one decode step, with one query per request.

    Kernel launches depend only on shapes and on whether any row selects pages. Tensor-parallel ranks have
    different heads but select the same pages.
    """

    def __init__(
        self, plan: LayerPlan, rows: BatchRows, scale: float, collectives: Collectives = SINGLE_RANK
    ) -> None:
        self._plan = plan
        self._rows = rows
        self._scale = scale
        self._collectives = collectives
        self._selected: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(
        self,
        layer: int,
        q_RHD: torch.Tensor,
        k_PSGD: torch.Tensor,
        v_PSGD: torch.Tensor,
        scales: Scales | None = None,
        sink_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute one layer's attention output, out_RHD. This step's KV must already be in the pages.

        Args:
            scales: The scales of an 8-bit KV cache.
            sink_H: The attention sinks (`AttentionInput`). Pages are scored without them, so that all heads
                count, however large their sinks.
        """
        out_RHD, lse_RH = self._attended(layer, q_RHD, k_PSGD, v_PSGD, scales)
        if sink_H is None:
            return out_RHD
        return with_sinks(out_RHD, lse_RH, sink_H)

    def _attended(
        self,
        layer: int,
        q_RHD: torch.Tensor,
        k_PSGD: torch.Tensor,
        v_PSGD: torch.Tensor,
        scales: Scales | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out_RHD and lse_RH without sinks, and select pages."""
        role, rows, window = self._plan.roles[layer], self._rows, self._plan.windows.get(layer, 0)
        table_RP = rows.table_RP if rows.rolling_RP is None or not window else rows.rolling_RP
        args = q_RHD, k_PSGD, v_PSGD, table_RP, rows.lengths_R
        how: dict[str, Any] = {"scale": self._scale, "scales": scales}
        if rows.selects_R is None or role is LayerRole.DENSE:
            return paged_attention(*args, **how, window=window)
        if role is LayerRole.SPARSE:
            assert self._selected is not None  # every sparse layer comes after a Δ-layer (plan_layers)
            selected_RK, counts_R = self._selected
            return paged_attention_sparse(*args, selected_RK=selected_RK, counts_R=counts_R, **how)
        alone = self._collectives.ranks == 1
        out_RHD, lse_RH, score_RS = paged_attention_scored(*args, span=PAGE_TOKENS if alone else 1, **how)
        page_score_RP = score_RS if alone else self._over_all_heads(score_RS)
        plan = self._plan
        selected_RK, counts_R = select_pages(
            page_score_RP, rows.lengths_R, budget=plan.budget, recency=plan.recency, page_tokens=PAGE_TOKENS
        )
        self._selected = selected_RK, counts_R * rows.selects_R  # a count of 0 means all pages
        return out_RHD, lse_RH

    def _over_all_heads(self, token_score_RS: torch.Tensor) -> torch.Tensor:
        score_RS = self._collectives.max(token_score_RS)
        return score_RS.view(len(score_RS), -1, PAGE_TOKENS).sum(-1)
