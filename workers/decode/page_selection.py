"""Which layers attend to all pages and which to selected ones: DELTA's decode (Algorithm 2).

Full layers attend densely. A Δ-layer attends densely and scores every page (token score: largest attention
weight over heads; page score: sum over the page's tokens); the best K pages, the last L always among them,
are all that the sparse layers up to the next Δ-layer read. Before the first Δ-layer no pages are selected
yet, so layers are dense too. Pages are selected for one decode step, and for each request by itself.

Shape suffixes: R requests of a batch, P columns of the page table, K selected pages, H query heads, D head
dimension, S slots of a page, G key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch

from ...kernels.paged_decode.attention import (
    paged_attention,
    paged_attention_scored,
    paged_attention_sparse,
)
from ...kernels.paged_decode.page_selection import select_pages
from ..kv.page_pool import PAGE_TOKENS
from ..settings import DecodeConfig


class PageSelectionError(ValueError):
    """A page selection that is not configured, or cannot be."""


class LayerRole(Enum):
    DENSE = auto()
    SCORING = auto()
    SPARSE = auto()


@dataclass(frozen=True)
class LayerPlan:
    """The role of every layer, and the budget K and recency L in pages."""

    roles: tuple[LayerRole, ...]
    budget: int
    recency: int

    @property
    def sparse_layers(self) -> int:
        return self.roles.count(LayerRole.SPARSE)

    @property
    def calibrated(self) -> bool:
        return LayerRole.SCORING in self.roles

    def selects_pages(self, page_selection: str, default: str) -> bool:
        """Whether a request's sparse layers read selected pages only. page_selection: as the request has it,
        empty for the worker's default.

        Raises PageSelectionError for an unknown name, and for `delta` without calibrated Δ-layers.
        """
        name = page_selection or default
        if name == "full":
            return False
        if name != "delta":
            raise PageSelectionError(f"unknown page selection {name!r}: use 'delta' or 'full'")
        if not self.calibrated:
            raise PageSelectionError(
                "page selection 'delta' needs calibrated delta_layers in the decode configuration: "
                "ask for 'full', or calibrate this model"
            )
        return True


def plan_layers(config: DecodeConfig, layers: int) -> LayerPlan:
    """Check the configuration against a model of `layers` layers. Raises PageSelectionError with the key."""
    for problem in config.layer_problems(layers):
        raise PageSelectionError(problem)
    both = set(config.full_layers) & set(config.delta_layers)
    if both:
        raise PageSelectionError(f"layers {sorted(both)} are in full_layers and in delta_layers: choose one")
    if not 1 <= config.recency <= config.page_budget:
        raise PageSelectionError(f"recency {config.recency} must be 1 .. page_budget ({config.page_budget})")
    if config.page_selection not in ("delta", "full"):
        raise PageSelectionError(f"page_selection must be 'delta' or 'full', got {config.page_selection!r}")
    first = min(config.delta_layers, default=layers)
    roles = []
    for layer in range(layers):
        if layer in config.delta_layers:
            roles.append(LayerRole.SCORING)
        elif layer in config.full_layers or layer < first:
            roles.append(LayerRole.DENSE)
        else:
            roles.append(LayerRole.SPARSE)
    return LayerPlan(tuple(roles), config.page_budget, config.recency)


@dataclass(frozen=True)
class BatchRows:
    """Where a batch's K/V is: table_RP and lengths_R (tokens, the one being computed included), and which
    rows select pages and which read all (1-D row indices; None where all or none select)."""

    table_RP: torch.Tensor
    lengths_R: torch.Tensor
    selecting: torch.Tensor | None
    full: torch.Tensor | None
    any_selects: bool


class StepAttention:
    """Attention of one decode step: one query row per request, layer after layer.

    attended_R counts the pages that sparse layers read for each request, held_R those they could have
    read. Both stay on the device.
    """

    def __init__(self, plan: LayerPlan, rows: BatchRows, scale: float) -> None:
        self._plan = plan
        self._rows = rows
        self._scale = scale
        self._selected_RK: torch.Tensor | None = None
        self._counts_R: torch.Tensor | None = None
        pages_R = (rows.lengths_R + PAGE_TOKENS - 1) // PAGE_TOKENS
        self._pages_R = pages_R.to(torch.int64)
        self.held_R = self._pages_R * plan.sparse_layers
        self.attended_R = torch.zeros_like(self.held_R)

    def attend(
        self, layer: int, q_RHD: torch.Tensor, k_PSGD: torch.Tensor, v_PSGD: torch.Tensor
    ) -> torch.Tensor:
        """out_RHD of one layer. The step's own keys and values must be in the pages already."""
        role = self._plan.roles[layer]
        if role is LayerRole.SPARSE:
            return self._sparse(q_RHD, k_PSGD, v_PSGD)
        if role is LayerRole.SCORING and self._rows.any_selects:
            return self._score(q_RHD, k_PSGD, v_PSGD)
        return self._dense(q_RHD, k_PSGD, v_PSGD, None)

    def _dense(
        self, q_RHD: torch.Tensor, k_PSGD: torch.Tensor, v_PSGD: torch.Tensor, pick: torch.Tensor | None
    ) -> torch.Tensor:
        rows = self._rows
        table_RP, lengths_R = _pick(rows.table_RP, pick), _pick(rows.lengths_R, pick)
        q_RHD = _pick(q_RHD, pick)
        out_RHD, _lse = paged_attention(q_RHD, k_PSGD, v_PSGD, table_RP, lengths_R, scale=self._scale)
        return out_RHD

    def _score(self, q_RHD: torch.Tensor, k_PSGD: torch.Tensor, v_PSGD: torch.Tensor) -> torch.Tensor:
        rows, pick = self._rows, self._rows.selecting
        lengths_R = _pick(rows.lengths_R, pick)
        out_RHD, _lse, page_score_RP = paged_attention_scored(
            _pick(q_RHD, pick), k_PSGD, v_PSGD, _pick(rows.table_RP, pick), lengths_R, scale=self._scale
        )
        self._selected_RK, self._counts_R = select_pages(
            page_score_RP,
            lengths_R,
            budget=self._plan.budget,
            recency=self._plan.recency,
            page_tokens=PAGE_TOKENS,
        )
        return self._with_full_rows(out_RHD, q_RHD, k_PSGD, v_PSGD)

    def _sparse(self, q_RHD: torch.Tensor, k_PSGD: torch.Tensor, v_PSGD: torch.Tensor) -> torch.Tensor:
        rows, pick = self._rows, self._rows.selecting
        if not rows.any_selects:
            self.attended_R += self._pages_R
            return self._dense(q_RHD, k_PSGD, v_PSGD, None)
        assert self._selected_RK is not None and self._counts_R is not None  # plan_layers sees to it
        out_RHD, _lse = paged_attention_sparse(
            _pick(q_RHD, pick),
            k_PSGD,
            v_PSGD,
            _pick(rows.table_RP, pick),
            _pick(rows.lengths_R, pick),
            self._selected_RK,
            self._counts_R,
            scale=self._scale,
        )
        if pick is None:
            self.attended_R += self._counts_R
        else:
            self.attended_R.index_add_(0, pick, self._counts_R.to(torch.int64))
            assert rows.full is not None
            self.attended_R.index_add_(0, rows.full, self._pages_R[rows.full])
        return self._with_full_rows(out_RHD, q_RHD, k_PSGD, v_PSGD)

    def _with_full_rows(
        self, selecting_RHD: torch.Tensor, q_RHD: torch.Tensor, k_PSGD: torch.Tensor, v_PSGD: torch.Tensor
    ) -> torch.Tensor:
        """Put the output of rows that select pages among that of the rows that attend to everything."""
        rows = self._rows
        if rows.selecting is None or rows.full is None:
            return selecting_RHD
        out_RHD = torch.empty_like(q_RHD)
        out_RHD.index_copy_(0, rows.selecting, selecting_RHD)
        return out_RHD.index_copy_(0, rows.full, self._dense(q_RHD, k_PSGD, v_PSGD, rows.full))


def _pick(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x.index_select(0, rows)
