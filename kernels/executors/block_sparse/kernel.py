"""Attention over a tile mask on the GPU. Suffixes as in `interface.py`."""

from __future__ import annotations

import torch

from ...interface import AttentionInput, TileMask
from ..common import check_mask
from ..launch import Rows, launch


def attend(x: AttentionInput, mask: TileMask) -> torch.Tensor:
    """See `reference.attend`. The last listed tile must be the diagonal; the others are taken unmasked."""
    kept = check_mask(x, mask, "block_sparse")
    out_BHTD = torch.empty(x.q_BHTD.shape, dtype=x.q_BHTD.dtype, device=x.q_BHTD.device)
    launch(x, Rows(x.q_BHTD, out_BHTD, x.q_start), mask=kept)
    return out_BHTD
