"""Strided scores in plain torch. Shape suffixes as in `kernels.interface`; I, J sampled rows."""

from __future__ import annotations

import torch
from torch.nn import functional

from ...interface import BLOCK, AttentionInput
from ..grouped import per_query_head, tile_scores


def scores(x: AttentionInput, stride: int) -> torch.Tensor:
    """Tile scores from every stride-th row of q and k: float32 score_BHNM.

    The attention of the sampled query rows over the sampled keys up to each, added up in tiles: the
    ablation that DeltaAttention section 4.3 compares its anchors with.
    """
    per_block = BLOCK // stride
    q_BHID, k_BGJD = _sampled(x.q_BHTD, stride), _sampled(x.k_BGSD, stride)
    logit_BHIJ = per_query_head(k_BGJD, q_BHID) * x.scale
    own_I = torch.arange(q_BHID.shape[2], device=q_BHID.device)
    real_I = own_I * stride < x.q_BHTD.shape[2]
    own_I = own_I + x.first_block * per_block
    column_J = torch.arange(k_BGJD.shape[2], device=q_BHID.device)
    return tile_scores(logit_BHIJ, (column_J <= own_I[:, None]) & real_I[:, None], per_block)


def _sampled(x: torch.Tensor, stride: int) -> torch.Tensor:
    """float32 rows 0, stride, 2 stride, ..., filled up with zeros to whole blocks."""
    return functional.pad(x[:, :, ::stride].float(), (0, 0, 0, (-x.shape[2] % BLOCK) // stride))
