"""FlexPrefill's tiles on the GPU; the work is in `selectors/lines_kernel.py` and in `block_pool`."""

from __future__ import annotations

import torch

from ...interface import BLOCK, AttentionInput
from ..block_pool import kernel as block_pool
from ..lines_kernel import line_masses
from .reference import choose


def keep(x: AttentionInput, gamma: float, tau: float) -> torch.Tensor:
    """See `reference.keep`; the block-mean scores come from logarithms in 16 bits."""
    return choose(*line_masses(x, BLOCK), block_pool.scores(x), gamma, tau)
