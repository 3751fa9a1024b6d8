"""Block-mean scores on the GPU; the work is in `selectors/grouped_kernel.py`."""

from __future__ import annotations

import torch

from ...interface import BLOCK, AttentionInput
from ..grouped_kernel import Grouping, log_sums
from ..rules.kernel import Sums
from .reference import block_means


def prepare(x: AttentionInput) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of the chunk's query blocks and of all key blocks, in the inputs' dtype."""
    return _means(x.q_BHTD), _means(x.k_BGSD)


def _means(x_BGSD: torch.Tensor) -> torch.Tensor:
    whole = x_BGSD.shape[2] // BLOCK * BLOCK
    batch, heads, _, dim = x_BGSD.shape
    blocks = x_BGSD[:, :, :whole].unflatten(2, (-1, BLOCK)) if whole else x_BGSD[:, :, :0]
    parts = [blocks.mean(3, dtype=torch.float32)] if whole else []
    if whole < x_BGSD.shape[2]:
        parts.append(block_means(x_BGSD[:, :, whole:]))
    return torch.cat(parts, dim=2).to(x_BGSD.dtype).view(batch, heads, -1, dim)


def score_sums(
    x: AttentionInput, means: tuple[torch.Tensor, torch.Tensor], first_row: int, blocks: int
) -> Sums:
    """Log2 scores of query blocks first_row .. first_row + blocks - 1 of the chunk."""
    part = log_sums(*means, x.first_block, x.scale, Grouping(1, 1, 1), first_row=first_row, blocks=blocks)
    return Sums(part, first_row)
