"""Vertical and slash tiles on the GPU; the work is in `selectors/lines_kernel.py`."""

from __future__ import annotations

import torch

from ...interface import AttentionInput
from ..lines_kernel import line_masses
from .reference import LAST_QUERIES, choose


def keep(x: AttentionInput, verticals: int, slashes: int) -> torch.Tensor:
    """See `reference.keep`."""
    return choose(*line_masses(x, LAST_QUERIES), verticals, slashes)
