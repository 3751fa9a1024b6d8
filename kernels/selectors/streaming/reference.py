"""Sink and window tiles. Shape suffixes as in `kernels.interface`."""

from __future__ import annotations

import torch

from ...interface import BLOCK, AttentionInput, TileMask
from ..rules.reference import compact


def select(x: AttentionInput, sink: int, window: int) -> TileMask:
    """Every tile that holds one of the first `sink` keys, or for some row of the query block one of its
    last `window` keys (the row's own among them). StreamingLLM (Xiao et al. 2023), section 3.2.
    """
    device = x.q_BHTD.device
    row_N1 = torch.arange(x.query_blocks, device=device)[:, None] + x.first_block
    column_M = torch.arange(x.key_blocks, device=device)
    oldest_N1 = torch.clamp(row_N1 * BLOCK - window + 1, min=0) // BLOCK
    keep_NM = (column_M <= row_N1) & ((column_M >= oldest_N1) | (column_M < -(-sink // BLOCK)))
    batch, heads = x.q_BHTD.shape[:2]
    return compact(keep_NM.expand(batch, heads, -1, -1))
