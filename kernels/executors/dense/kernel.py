"""Dense causal attention on the GPU: the tile kernel over every key. Suffixes as in `interface.py`."""

from __future__ import annotations

import torch

from ...interface import AttentionInput
from ..launch import Rows, launch


def attend(x: AttentionInput) -> torch.Tensor:
    """See `reference.attend`; any q_start. Scores in float32, weights rounded to q's type."""
    out_BHTD = torch.empty(x.q_BHTD.shape, dtype=x.q_BHTD.dtype, device=x.q_BHTD.device)
    launch(x, Rows(x.q_BHTD, out_BHTD, x.q_start))
    return out_BHTD
