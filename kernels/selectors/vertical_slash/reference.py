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
    return choose(*line_masses(last_attention(x, LAST_QUERIES)), verticals, slashes)


def choose(vertical_BHM: torch.Tensor, band_BHM: torch.Tensor, verticals: int, slashes: int) -> torch.Tensor:
    """bool_BHNM from the lines' masses; plain torch on every device, without a host sync."""
    return tiles_of_lines(heaviest(vertical_BHM, verticals), heaviest(band_BHM, slashes))
