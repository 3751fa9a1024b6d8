"""Selectors that rank tiles by scores which the service does not have, in torch on any device.

Shape suffixes are defined in `kernels.interface`; I, J groups of rows and of keys, S rows of a group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from deltafront.benchmarks.paper_forms.methods import (
    NaiveCellsOptions,
    ThesisAnchorsOptions,
    XAttentionPaperOptions,
)
from deltafront.kernels.anchor_scan import find_anchors
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, Phase, TileMask
from deltafront.kernels.selectors.grouped.antidiagonal import AntidiagonalSelector, tile_scores
from deltafront.kernels.selectors.rules.cpu import compact
from deltafront.kernels.selectors.rules.kernel import select as kernel_select
from deltafront.kernels.selectors.rules.rule import Rule
from deltafront.kernels.selectors.scored import ScoredSelector, ScoredState

SLAB = 16
"""Number of query blocks that are scored at once, so that a head's logits of a long prompt fit GPU memory."""


class TorchSelector(ScoredSelector):
    """Scores tiles in torch on any device. On a GPU only the selection rule is a kernel."""

    def kernel_scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        return self.cpu_scores(x, state, phase)

    def kernel_select(self, x: AttentionInput, state: ScoredState, phase: Phase) -> TileMask:
        score_BHNM = self.cpu_scores(x, state, phase)
        with phase("selection"):
            return kernel_select(score_BHNM, state.rule, x.first_block, with_scores=self.with_scores)


class HeadSelector(TorchSelector):
    """Scores one head after the other, in slabs of query blocks."""

    def cpu_scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        with phase("scoring"):
            score_BHNM = torch.zeros(
                *x.q_BHTD.shape[:2], x.query_blocks, x.key_blocks, device=x.q_BHTD.device
            )
            for b in range(score_BHNM.shape[0]):
                for h in range(score_BHNM.shape[1]):
                    for first in range(0, x.query_blocks, SLAB):
                        rows = slice(first, min(first + SLAB, x.query_blocks))
                        score_BHNM[b, h, rows] = self.head_scores(x, b, h, rows)
            return score_BHNM

    @abstractmethod
    def head_scores(self, x: AttentionInput, b: int, h: int, rows: slice) -> torch.Tensor:
        """Return float32 score_NM of a head's query blocks `rows`."""


class PairedSelector(HeadSelector):
    """XAttention with other pairs of rows in a cell, other strides, or a fixed number of tiles. Antidiagonal
    pairs are scored by the service's selector."""

    name = "xattention_paper"

    def __init__(self, options: XAttentionPaperOptions) -> None:
        super().__init__(options)
        self._served = AntidiagonalSelector(options) if options.pattern == 0 else None
        self.stride, self._top = options.stride, options.top
        self.order = pairs_of(options)
        self.scored_share = 1.0 / self.stride

    def scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        if self._served is not None:
            return self._served.scores(x, state, phase)
        return super().scores(x, state, phase)

    def select(self, x: AttentionInput, state: ScoredState, phase: Phase) -> TileMask:
        if self._top > 0:
            return top_tiles(self.scores(x, state, phase), state.rule, x.first_block, self._top)
        if self._served is not None:
            return self._served.select(x, state, phase)
        return super().select(x, state, phase)

    def head_scores(self, x: AttentionInput, b: int, h: int, rows: slice) -> torch.Tensor:
        g, start = h // x.group, rows.start * BLOCK
        q_TD, k_SD = x.q_BHTD[b, h, start : rows.stop * BLOCK], x.k_BGSD[b, g]
        return paired_scores(q_TD, k_SD, x.q_start + start, x.scale, self.order, x.key_blocks)


def pairs_of(options: XAttentionPaperOptions) -> list[int]:
    """Return, for each row of a query group, the index of the key in a key group that it is paired with."""
    stride = options.stride
    if options.pattern == 2:
        return torch.randperm(stride, generator=torch.Generator().manual_seed(options.seed)).tolist()
    return list(range(stride)) if options.pattern == 1 else list(range(stride - 1, -1, -1))


def paired_scores(
    q_TD: torch.Tensor, k_SD: torch.Tensor, start: int, scale: float, order: Sequence[int], blocks: int
) -> torch.Tensor:
    """Compute `antidiagonal.cpu_scores` with any row pairs: float32 score_NM for rows from `start` on."""
    stride, dim = len(order), q_TD.shape[1]
    device, per_block = q_TD.device, BLOCK // stride
    q_ISD = _whole_blocks(q_TD).view(-1, stride, dim)
    k_JSD = _whole_blocks(k_SD).view(-1, stride, dim)[:, order]
    group_I = torch.arange(q_ISD.shape[0], device=device)
    filled_I = (q_TD.shape[0] - group_I * stride).clamp(0, stride)
    logit_IJ = q_ISD.flatten(1) @ k_JSD.flatten(1).T * scale / filled_I.clamp(min=1)[:, None]
    own_I, row_S = group_I + start // stride, torch.arange(stride, device=device)
    pair_IS = (torch.tensor(order, device=device) <= row_S) & (row_S < filled_I[:, None])
    own_logit_I = ((q_ISD * k_JSD[own_I]).sum(2) * pair_IS).sum(1) * scale / pair_IS.sum(1).clamp(min=1)
    logit_IJ[group_I, own_I] = own_logit_I
    allowed_IJ = torch.arange(k_JSD.shape[0], device=device) < own_I[:, None]
    allowed_IJ &= (filled_I > 0)[:, None]
    allowed_IJ[group_I, own_I] = pair_IS.any(1)
    return tile_scores(logit_IJ[None, None], allowed_IJ, per_block)[0, 0, :, :blocks]


def _whole_blocks(x_SD: torch.Tensor) -> torch.Tensor:
    return functional.pad(x_SD.float(), (0, 0, 0, -x_SD.shape[0] % BLOCK))


def top_tiles(score_BHNM: torch.Tensor, rule: Rule, first_block: int, count: int) -> TileMask:
    """Keep sink, window and the `count` best other tiles of each query block."""
    rows, columns = score_BHNM.shape[2:]
    diagonal_N1 = torch.arange(rows, device=score_BHNM.device)[:, None] + first_block
    column_M = torch.arange(columns, device=score_BHNM.device)
    causal_NM = column_M <= diagonal_N1
    forced_NM = (column_M > diagonal_N1 - rule.window_blocks) | (column_M < rule.sink_blocks)
    ranked_BHNM = score_BHNM.masked_fill(forced_NM | ~causal_NM, -1.0)
    best_BHNX = ranked_BHNM.topk(min(count, columns), dim=-1).indices
    return compact(forced_NM.expand_as(ranked_BHNM).scatter(-1, best_BHNX, True) & causal_NM)


class CellsSelector(HeadSelector):
    """Sums exponentials of sampled rows and keys in each tile, normalised over a query block."""

    @abstractmethod
    def sampled(self, x: AttentionInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Return masks of the sampled rows of the chunk and of the sampled keys: bool_BHT and bool_BGS."""

    def cpu_scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        with phase("anchors"):
            self._rows_BHT, self._keys_BGS = self.sampled(x)
        return super().cpu_scores(x, state, phase)

    def head_scores(self, x: AttentionInput, b: int, h: int, rows: slice) -> torch.Tensor:
        key_J = self._keys_BGS[b, h // x.group].nonzero().flatten()
        k_JD = x.k_BGSD[b, h // x.group, key_J].float()
        score_NM = torch.zeros(rows.stop - rows.start, x.key_blocks, device=x.q_BHTD.device)
        for n in range(rows.start, rows.stop):
            row_I = self._rows_BHT[b, h, n * BLOCK : (n + 1) * BLOCK].nonzero().flatten() + n * BLOCK
            logit_IJ = x.q_BHTD[b, h, row_I].float() @ k_JD.T * x.scale
            later_IJ = key_J > row_I[:, None] + x.q_start
            mass_IJ = logit_IJ.masked_fill(later_IJ, -torch.inf).flatten().softmax(0)
            score_NM[n - rows.start].index_add_(0, key_J // BLOCK, mass_IJ.view(logit_IJ.shape).sum(0))
        return score_NM


class NaiveCellsSelector(CellsSelector):
    name = "naive_cells"

    def __init__(self, options: NaiveCellsOptions) -> None:
        super().__init__(options)
        self._every = options.every
        self.scored_share = 1.0 / options.every**2

    def sampled(self, x: AttentionInput) -> tuple[torch.Tensor, torch.Tensor]:
        place_S = torch.arange(x.k_BGSD.shape[2], device=x.k_BGSD.device) % self._every == 0
        return place_S[x.q_start :].expand(x.q_BHTD.shape[:3]), place_S.expand(x.k_BGSD.shape[:3])


class ThesisAnchorsSelector(CellsSelector):
    name = "dpxa_thesis"
    scored_share = 1.0

    def __init__(self, options: ThesisAnchorsOptions) -> None:
        super().__init__(options)
        self._cos = options.cos

    def sampled(self, x: AttentionInput) -> tuple[torch.Tensor, torch.Tensor]:
        return find_anchors(x.q_BHTD, self._cos), find_anchors(x.k_BGSD, self._cos)
