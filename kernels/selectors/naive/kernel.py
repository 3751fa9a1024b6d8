"""Strided scores on the GPU; the work is in `selectors/grouped_kernel.py`."""

from __future__ import annotations

from ...interface import BLOCK, AttentionInput
from ..grouped_kernel import Packed, pack
from ..packing_kernel import Grouping


def prepare(x: AttentionInput, stride: int) -> Packed:
    """The first row of every group."""
    return pack(x.q_BHTD, x.k_BGSD, x.q_start, x.scale, Grouping(stride, 1, BLOCK // stride))
