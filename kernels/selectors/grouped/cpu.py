"""From logits between groups of rows to tile scores. Suffixes: I, J query and key groups."""

from __future__ import annotations

import torch


def tile_scores(logit_BHIJ: torch.Tensor, allowed_IJ: torch.Tensor, per_block: int) -> torch.Tensor:
    """Softmax every row over its allowed columns, then add up tiles of per_block x per_block groups: float32
    score_BHNM. Rows without an allowed column give nothing."""
    logit_BHIJ = logit_BHIJ.masked_fill(~allowed_IJ, float("-inf"))
    mass_BHIJ = torch.softmax(logit_BHIJ, dim=-1).nan_to_num(0.0)
    batch, heads, rows, columns = mass_BHIJ.shape
    tiles = mass_BHIJ.view(batch, heads, rows // per_block, per_block, columns // per_block, per_block)
    return tiles.sum(dim=(3, 5))


def per_query_head(k_BGJX: torch.Tensor, q_BHIX: torch.Tensor) -> torch.Tensor:
    """q . k for every query head against its key head: logit_BHIJ."""
    batch, heads, rows, width = q_BHIX.shape
    groups = k_BGJX.shape[1]
    stacked = q_BHIX.reshape(batch, groups, heads // groups * rows, width)
    return (stacked @ k_BGJX.transpose(2, 3)).view(batch, heads, rows, k_BGJX.shape[2])
