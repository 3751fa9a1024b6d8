"""Baselines for all heads: MInference's block-sparse pattern and SpargeAttn's prediction of tiles.

Shape suffixes are defined in `kernels.interface`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from deltafront.benchmarks.paper_forms.methods import BlockTopOptions, SpargeOptions
from deltafront.benchmarks.paper_forms.tile_scores import TorchSelector, top_tiles
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, Phase, StateSpec, TileMask
from deltafront.kernels.selectors.grouped.antidiagonal import per_query_head, tile_scores
from deltafront.kernels.selectors.rules.cpu import compact
from deltafront.kernels.selectors.scored import ScoredState


class BlockPoolSelector(TorchSelector):
    """Scores tiles by a softmax over the causal key blocks of mean query · mean key."""

    name = "block_pool"
    scored_share = 1.0 / BLOCK**2

    def cpu_scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        with phase("scoring"):
            q_BHND, k_BGMD = block_means(x.q_BHTD), block_means(x.k_BGSD)
            row_N = torch.arange(x.query_blocks, device=q_BHND.device) + x.first_block
            column_M = torch.arange(x.key_blocks, device=q_BHND.device)
            return tile_scores(per_query_head(k_BGMD, q_BHND) * x.scale, column_M <= row_N[:, None], 1)


def block_means(x_BGSD: torch.Tensor) -> torch.Tensor:
    """Compute the float32 mean of each block's existing rows."""
    batch, heads, rows, dim = x_BGSD.shape
    padded = functional.pad(x_BGSD.float(), (0, 0, 0, -rows % BLOCK))
    padded_BGMRD = padded.view(batch, heads, -1, BLOCK, dim)
    start_M = torch.arange(padded_BGMRD.shape[2], device=x_BGSD.device) * BLOCK
    return padded_BGMRD.sum(3) / torch.clamp(rows - start_M, max=BLOCK)[:, None]


class BlockTopSelector(BlockPoolSelector):
    """Keeps a fixed number of key blocks with the largest mean query · mean key."""

    def __init__(self, options: BlockTopOptions) -> None:
        super().__init__(options)
        self._top = options.top

    def select(self, x: AttentionInput, state: ScoredState, phase: Phase) -> TileMask:
        score_BHNM = self.scores(x, state, phase)
        with phase("selection"):
            return top_tiles(score_BHNM, state.rule, x.first_block, self._top)


class SpargeSelector:
    """SpargeAttn's first stage. The mean of a block stands for its rows if they are similar.

    A query block keeps the largest tiles of the attention between means, up to a mass of tau, but at least
    one. A query block with dissimilar rows keeps all tiles, and all query blocks keep a key block with
    dissimilar rows. Diagonal and block 0 are kept, as in every mask here. Tiles have 128 keys in place of the
    paper's 64. The second stage skips p · v inside tiles and changes no mask.
    """

    scored_share = 1.0 / BLOCK**2

    def __init__(self, options: SpargeOptions) -> None:
        self._tau, self._theta = options.tau, options.theta

    def new_state(self, spec: StateSpec) -> None:
        return None

    def select(self, x: AttentionInput, state: None, phase: Phase) -> TileMask:
        x.require_aligned("sparge")
        with phase("scoring"):
            q_BHND, k_BGMD = block_means(x.q_BHTD), block_means(x.k_BGSD)
            logit_BHNM = per_query_head(k_BGMD, q_BHND) * x.scale
            alike_BHN1 = (self_similarity(x.q_BHTD) > self._theta)[..., None]
            alike_BGM = self_similarity(x.k_BGSD) > self._theta
            alike_BH1M = alike_BGM.repeat_interleave(x.group, dim=1)[:, :, None]
        with phase("selection"):
            row_N1 = torch.arange(x.query_blocks, device=logit_BHNM.device)[:, None] + x.first_block
            column_M = torch.arange(x.key_blocks, device=logit_BHNM.device)
            causal_NM = column_M <= row_N1
            seen_BHNM = causal_NM & alike_BH1M
            mass_BHNM = logit_BHNM.masked_fill(~seen_BHNM, -torch.inf).softmax(-1).nan_to_num(0.0)
            kept_BHNM = top_mass(mass_BHNM, self._tau) | ~alike_BHN1 | ~alike_BH1M
            kept_BHNM |= (column_M == row_N1) | (column_M == 0)
            return compact(kept_BHNM & causal_NM)


def top_mass(mass_BHNM: torch.Tensor, tau: float) -> torch.Tensor:
    """Mark the largest entries of each row whose sum is at most tau, but at least one."""
    ordered_BHNM, order_BHNM = mass_BHNM.sort(dim=-1, descending=True, stable=True)
    within_BHNM = ordered_BHNM.cumsum(-1) <= tau
    within_BHNM[..., 0] = True
    return torch.zeros_like(within_BHNM).scatter_(-1, order_BHNM, within_BHNM)


def self_similarity(x_BGSD: torch.Tensor) -> torch.Tensor:
    """Return the mean cosine between all pairs of a block's rows, float32 (batch, heads, blocks)."""
    rows = x_BGSD.shape[2]
    unit_BGSD = functional.normalize(x_BGSD.float(), dim=-1)
    unit_BGSD = functional.pad(unit_BGSD, (0, 0, 0, -rows % BLOCK))
    sum_BGMD = unit_BGSD.view(*unit_BGSD.shape[:2], -1, BLOCK, unit_BGSD.shape[3]).sum(3)
    start_M = torch.arange(sum_BGMD.shape[2], device=x_BGSD.device) * BLOCK
    return sum_BGMD.square().sum(-1) / torch.clamp(rows - start_M, max=BLOCK).square()
