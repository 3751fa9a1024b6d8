"""Vertical and slash tiles. Shape suffixes as in `kernels.interface`."""

from __future__ import annotations

import torch

from ...interface import AttentionInput
from ..lines import heaviest, last_attention, line_masses, tiles_of_lines

LAST_QUERIES = 64


def keep(x: AttentionInput, verticals: int, slashes: int) -> torch.Tensor:
    """bool_BHNM: tiles of the heaviest lines of the last 64 queries' attention.

    MInference (Jiang et al. 2024), Algorithm 2, with budgets in lines filled by blocks of 128 lines.
    """
    vertical_BHM, band_BHM = line_masses(last_attention(x, LAST_QUERIES))
    return tiles_of_lines(heaviest(vertical_BHM, verticals), heaviest(band_BHM, slashes))
