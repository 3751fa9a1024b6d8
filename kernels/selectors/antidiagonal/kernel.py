"""Antidiagonal scores on the GPU; the work is in `selectors/grouped_kernel.py`."""

from __future__ import annotations

from ...interface import BLOCK, AttentionInput
from ..grouped_kernel import Packed, pack
from ..packing_kernel import Grouping, own_logits


def prepare(x: AttentionInput, stride: int) -> Packed:
    """Whole groups side by side, and their logits against themselves: for those the keys up to each query."""
    grouping = Grouping(stride, stride, BLOCK // stride)
    return pack(x.q_BHTD, x.k_BGSD, x.q_start, x.scale, grouping, own_logits(x, stride))
