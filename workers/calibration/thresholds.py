"""XAttention's search for each head's threshold (Xu et al. 2025, section 2.3), as the comparison for
`allocation.py`: how well the model does after so many adjustments, each of which takes a tenth off the
threshold of one head.

The paper's table D[h][m] holds the best performance with m adjustments among the first h heads. It counts
adjustments, not tiles, and so finds the best of all ways to make m of them; `allocation.py` counts tiles.
What the paper measures on the model is taken here as the sum of the heads' losses.

Shape suffixes: H heads, I quotas measured, J adjustments of one head, M of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

START, FACTOR = 0.9, 0.9
"""The paper's: where every head's threshold begins, and what an adjustment multiplies it with."""

ADJUSTMENTS = 24
"""Of one head: down to a threshold of 0.07."""


def adjusted_quotas(
    density_HI: torch.Tensor, loss_HI: torch.Tensor, quotas: Sequence[float], density: float
) -> list[float]:
    """The quota of each head after as few adjustments as bring the mean density to `density` or below, made
    where they cost least together. Between measured quotas, density and loss are taken to be linear.

    Raises ValueError if adjusting every head as often as can be leaves more.
    """
    quota_J = _thresholds()
    density_HJ, loss_HJ = (between(value, quotas, quota_J) for value in (density_HI, loss_HI))
    adjusted_HM, density_M = _table(density_HJ, loss_HJ)
    met = (density_M <= density * len(density_HJ) + 1e-9).nonzero()
    if not len(met):
        least = least_adjusted(density_HI, quotas)
        raise ValueError(
            f"a mean density of {density:g} cannot be had: the least thresholds take {least:.4f}"
        )
    left, chosen = int(met[0]), list[float]()
    for adjusted_M in reversed(adjusted_HM):
        mine = int(adjusted_M[left])
        chosen.append(round(float(quota_J[mine]), 6))
        left -= mine
    return chosen[::-1]


def least_adjusted(density_HI: torch.Tensor, quotas: Sequence[float]) -> float:
    """The mean density of heads that are all adjusted as often as can be."""
    return float(between(density_HI, quotas, _thresholds()[-1:]).mean())


def _thresholds() -> torch.Tensor:
    """quota_J, float64: of a head after so many adjustments."""
    return START * FACTOR ** torch.arange(ADJUSTMENTS + 1, dtype=torch.float64)


def _table(density_HJ: torch.Tensor, loss_HJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """adjusted_HM: how often the head is adjusted where the heads up to it are adjusted M times and lose as
    little as can be; density_M: the sum over all heads then."""
    heads, most = density_HJ.shape[0], density_HJ.shape[1] - 1
    loss_M = torch.full((heads * most + 1,), float("inf"), dtype=torch.float64)
    loss_M[0] = 0.0
    density_M = torch.zeros_like(loss_M)
    adjusted_HM = torch.empty(heads, len(loss_M), dtype=torch.uint8)
    for head in range(heads):
        by_J = [_later(loss_M, j, float("inf")) + loss_HJ[head, j] for j in range(most + 1)]
        loss_M, adjusted_M = torch.stack(by_J).min(0)
        dense_JM = torch.stack([_later(density_M, j, 0.0) + density_HJ[head, j] for j in range(most + 1)])
        density_M = dense_JM.gather(0, adjusted_M[None])[0]
        adjusted_HM[head] = adjusted_M.to(torch.uint8)
    return adjusted_HM, density_M


def _later(value_M: torch.Tensor, places: int, first: float) -> torch.Tensor:
    return torch.nn.functional.pad(value_M[: len(value_M) - places], (places, 0), value=first)


def between(value_HI: torch.Tensor, quotas: Sequence[float], quota_J: torch.Tensor) -> torch.Tensor:
    """float64 value_HJ at quotas between the measured ones, which ascend."""
    quota_I = torch.tensor(quotas, dtype=torch.float64)
    after_J = torch.searchsorted(quota_I, quota_J).clamp(1, len(quotas) - 1)
    low_J, high_J = quota_I[after_J - 1], quota_I[after_J]
    return torch.lerp(
        value_HI.double()[:, after_J - 1], value_HI.double()[:, after_J], (quota_J - low_J) / (high_J - low_J)
    )
