"""Dense causal attention in fp32, on the CPU. Shape suffixes as in `interface.py`."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from ...interface import AttentionInput

ROWS = 512
"""Rows per step: each step sees no more keys than its last row may."""


def attend(x: AttentionInput) -> torch.Tensor:
    """softmax(q k^T * scale) v over all keys at or before each row; any q_start. Returns q's dtype."""
    return attend_rows(x, torch.arange(x.q_start, x.q_start + x.q_BHTD.shape[2], device=x.q_BHTD.device))


def attend_rows(x: AttentionInput, position_R: torch.Tensor) -> torch.Tensor:
    """Dense attention of the chunk's rows at the ascending absolute positions position_R: out_BHRD."""
    parts = []
    for position in torch.split(position_R, ROWS):
        end = int(position[-1]) + 1
        seen = torch.arange(end, device=position.device) <= position[:, None]
        part = scaled_dot_product_attention(
            x.q_BHTD[:, :, position - x.q_start].float(),
            x.k_BGSD[:, :, :end].float(),
            x.v_BGSD[:, :, :end].float(),
            attn_mask=seen,
            scale=x.scale,
            enable_gqa=True,
        )
        parts.append(part.to(x.q_BHTD.dtype))
    return torch.cat(parts, dim=2)
