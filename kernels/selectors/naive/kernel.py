"""Strided scores on the GPU; the work is in `selectors/grouped_kernel.py`."""

from __future__ import annotations

from ...interface import BLOCK, AttentionInput
from ..grouped_kernel import Grouping, log_sums
from ..rules.kernel import Sums


def score_sums(x: AttentionInput, stride: int, first_row: int, blocks: int) -> Sums:
    """Log2 sums of query blocks first_row .. first_row + blocks - 1 of the chunk, a row a sampled query."""
    part = log_sums(
        x.q_BHTD,
        x.k_BGSD,
        x.q_start,
        x.scale,
        Grouping(stride, 1, BLOCK // stride),
        first_row=first_row,
        blocks=blocks,
    )
    return Sums(part, first_row)
