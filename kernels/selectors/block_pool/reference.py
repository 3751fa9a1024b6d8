"""Scores of block means in plain torch. Shape suffixes as in `kernels.interface`."""

from __future__ import annotations

import torch
from torch.nn import functional

from ...interface import BLOCK, AttentionInput
from ..grouped import per_query_head, tile_scores


def scores(x: AttentionInput) -> torch.Tensor:
    """Softmax over the causal key blocks of mean(q) . mean(k): float32 score_BHNM."""
    q_BHND, k_BGMD = block_means(x.q_BHTD), block_means(x.k_BGSD)
    row_N = torch.arange(x.query_blocks, device=q_BHND.device) + x.first_block
    column_M = torch.arange(x.key_blocks, device=q_BHND.device)
    return tile_scores(per_query_head(k_BGMD, q_BHND) * x.scale, column_M <= row_N[:, None], 1)


def block_means(x_BGSD: torch.Tensor) -> torch.Tensor:
    """float32 mean of each block of rows, over the rows that it has."""
    batch, heads, rows, dim = x_BGSD.shape
    padded = functional.pad(x_BGSD.float(), (0, 0, 0, -rows % BLOCK)).view(batch, heads, -1, BLOCK, dim)
    start_M = torch.arange(padded.shape[2], device=x_BGSD.device) * BLOCK
    return padded.sum(3) / torch.clamp(rows - start_M, max=BLOCK)[:, None]
