"""Tiles ranked by mean query against mean key."""

from __future__ import annotations

import torch
from torch.nn import functional

from ...constants import BLOCK
from ...interface import AttentionInput, Phase
from ...options import BlockPoolOptions
from ..rules.sums import Sums
from ..scored import ScoredSelector, SlabSums
from .cpu import per_query_head, tile_scores
from .kernel import log_sums, pack
from .packing import Grouping


class BlockPoolSelector(ScoredSelector):
    name = "block_pool"
    sampled = 1.0 / BLOCK**2

    def __init__(self, options: BlockPoolOptions) -> None:
        super().__init__(options)

    def cpu_scores(self, x: AttentionInput, state: object, phase: Phase) -> torch.Tensor:
        with phase("scoring"):
            return cpu_scores(x)

    def slab_sums(self, x: AttentionInput, state: object, phase: Phase) -> tuple[int, SlabSums]:
        with phase("scoring"):
            q_BHND, k_BGMD = _read_once(x.q_BHTD), _read_once(x.k_BGSD)
            groups = pack(q_BHND, k_BGMD, x.first_block, x.scale, Grouping(1, 1, 1))
        return 1, lambda first, blocks: Sums(log_sums(groups, first, blocks), first)


def cpu_scores(x: AttentionInput) -> torch.Tensor:
    """Softmax over the causal key blocks of mean(q) . mean(k): float32 score_BHNM."""

    q_BHND, k_BGMD = block_means(x.q_BHTD), block_means(x.k_BGSD)
    row_N = torch.arange(x.query_blocks, device=q_BHND.device) + x.first_block
    column_M = torch.arange(x.key_blocks, device=q_BHND.device)
    return tile_scores(per_query_head(k_BGMD, q_BHND) * x.scale, column_M <= row_N[:, None], 1)


def block_means(x_BGSD: torch.Tensor) -> torch.Tensor:
    """float32 mean of each block of rows, over the rows that exist."""
    batch, heads, rows, dim = x_BGSD.shape
    padded = functional.pad(x_BGSD.float(), (0, 0, 0, -rows % BLOCK)).view(batch, heads, -1, BLOCK, dim)
    start_M = torch.arange(padded.shape[2], device=x_BGSD.device) * BLOCK
    return padded.sum(3) / torch.clamp(rows - start_M, max=BLOCK)[:, None]


def _read_once(x_BGSD: torch.Tensor) -> torch.Tensor:
    """`block_means` without a float32 copy of x. Means stay float32, so that small numbers are not rounded
    further."""
    full_rows = x_BGSD.shape[2] // BLOCK * BLOCK
    batch, heads, _, dim = x_BGSD.shape
    blocks = x_BGSD[:, :, :full_rows].reshape(batch, heads, -1, BLOCK, dim)
    parts = [blocks.mean(3, dtype=torch.float32)]
    if full_rows < x_BGSD.shape[2]:
        parts.append(block_means(x_BGSD[:, :, full_rows:]))
    return torch.cat(parts, dim=2).view(batch, heads, -1, dim)
