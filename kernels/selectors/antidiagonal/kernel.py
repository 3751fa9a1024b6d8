"""Antidiagonal scores on the GPU; the work is in `selectors/grouped_kernel.py`."""

from __future__ import annotations

import torch

from ...interface import BLOCK, AttentionInput
from ..grouped_kernel import Grouping, log_sums, own_logits
from ..rules.kernel import Sums


def prepare(x: AttentionInput, stride: int) -> torch.Tensor:
    """Every group's logit against itself, over the pairs whose key is not after the query."""
    return own_logits(x, stride)


def score_sums(x: AttentionInput, stride: int, own_BHI: torch.Tensor, first_row: int, blocks: int) -> Sums:
    """Log2 sums of query blocks first_row .. first_row + blocks - 1 of the chunk, a row a query group."""
    part = log_sums(
        x.q_BHTD,
        x.k_BGSD,
        x.q_start,
        x.scale,
        Grouping(stride, stride, BLOCK // stride),
        first_row=first_row,
        blocks=blocks,
        own_BHI=own_BHI,
    )
    return Sums(part, first_row)
