"""Block-mean scores on the GPU; the work is in `selectors/grouped_kernel.py`."""

from __future__ import annotations

import torch

from ...interface import BLOCK, AttentionInput
from ..grouped_kernel import Packed, pack
from ..packing_kernel import Grouping
from .reference import block_means


def prepare(x: AttentionInput) -> Packed:
    """Means of the chunk's query blocks and of all key blocks."""
    return pack(_means(x.q_BHTD), _means(x.k_BGSD), x.first_block, x.scale, Grouping(1, 1, 1))


def _means(x_BGSD: torch.Tensor) -> torch.Tensor:
    """float32, so that what is small already is not rounded further."""
    whole = x_BGSD.shape[2] // BLOCK * BLOCK
    batch, heads, _, dim = x_BGSD.shape
    blocks = x_BGSD[:, :, :whole].reshape(batch, heads, -1, BLOCK, dim)
    parts = [blocks.mean(3, dtype=torch.float32)]
    if whole < x_BGSD.shape[2]:
        parts.append(block_means(x_BGSD[:, :, whole:]))
    return torch.cat(parts, dim=2).view(batch, heads, -1, dim)
