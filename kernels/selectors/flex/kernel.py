"""FlexPrefill's tiles on the GPU; the work is in `selectors/lines_kernel.py` and in `block_pool`."""

from __future__ import annotations

import torch

from ...interface import BLOCK, AttentionInput, no_phase
from ..block_pool.selector import BlockPoolSelector
from ..lines_kernel import line_masses
from .reference import choose


def keep(x: AttentionInput, gamma: float, tau: float) -> torch.Tensor:
    """See `reference.keep`; the block-mean scores come from logarithms in 16 bits."""
    pooled = BlockPoolSelector({"tau": gamma})  # its scores do not depend on tau
    return choose(*line_masses(x, BLOCK), pooled.kernel_scores(x, None, no_phase), gamma, tau)
