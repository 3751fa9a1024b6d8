"""FlexPrefill's choice of pattern and tiles. Shape suffixes as in `kernels.interface`."""

from __future__ import annotations

import torch

from ...interface import BLOCK, AttentionInput
from ..block_pool import reference as block_pool
from ..lines import heaviest_share, last_attention, line_masses, tiles_of_lines


def keep(x: AttentionInput, gamma: float, tau: float) -> torch.Tensor:
    """bool_BHNM of a whole prompt (FlexPrefill, Lai et al. 2025).

    Algorithm 2: a head is query-aware where the square root of the Jensen-Shannon divergence (natural
    logarithm) between the true block masses of the last 128 queries and those estimated from block means is
    below tau. Algorithm 4: such a head keeps the heaviest tiles of its whole block-mean map until they hold
    gamma of it. Algorithm 3: any other keeps the heaviest key blocks and bands of distances, each until
    they hold gamma of the last queries' mass.
    """
    masses = line_masses(last_attention(x, BLOCK))
    return choose(*masses, block_pool.scores(x), gamma, tau)


def choose(
    vertical_BHM: torch.Tensor,
    band_BHM: torch.Tensor,
    score_BHNM: torch.Tensor,
    gamma: float,
    tau: float,
) -> torch.Tensor:
    """bool_BHNM from the lines' masses and the block-mean map; plain torch on every device, no host sync."""
    true_BHM = vertical_BHM / vertical_BHM.sum(-1, keepdim=True)
    aware_BH11 = (js_distance(true_BHM, score_BHNM[:, :, -1]) < tau)[..., None, None]
    map_BHNM = heaviest_share(score_BHNM.flatten(2), gamma).view_as(score_BHNM)
    lines_BHNM = tiles_of_lines(heaviest_share(vertical_BHM, gamma), heaviest_share(band_BHM, gamma))
    return torch.where(aware_BH11, map_BHNM, lines_BHNM)


def js_distance(p_BHM: torch.Tensor, q_BHM: torch.Tensor) -> torch.Tensor:
    """Square root of the Jensen-Shannon divergence of two distributions over the last dimension."""
    middle_BHM = (p_BHM + q_BHM) / 2
    total_BH = _divergence(p_BHM, middle_BHM) + _divergence(q_BHM, middle_BHM)
    return (total_BH / 2).clamp(min=0).sqrt()


def _divergence(p_BHM: torch.Tensor, middle_BHM: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence, where 0 log 0 is 0."""
    terms_BHM = torch.where(p_BHM > 0, p_BHM * (p_BHM / middle_BHM).log(), 0.0)
    return terms_BHM.sum(-1)
