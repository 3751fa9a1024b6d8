"""XAttention's search for each head's threshold (Xu et al. 2025, section 2.3), an alternative to
`allocation.py`.

The paper's table D[h][m] has the best performance of m adjustments in the first h heads. Each adjustment
lowers one head's threshold by a tenth. Here the sum of the heads' losses takes the place of performance.

Shape suffixes also: I measured quotas, J adjustments of one head, M adjustments of all heads.
"""

from collections.abc import Sequence

import torch

START, FACTOR = 0.9, 0.9
"""The paper's first threshold and factor."""

ADJUSTMENTS = 24
"""Maximum number of adjustments of one head, down to a threshold of 0.07."""


def adjusted_quotas(
    density_HI: torch.Tensor, loss_HI: torch.Tensor, quotas: Sequence[float], density: float
) -> list[float]:
    """Return each head's quota after the fewest adjustments that reach the mean density with minimum total
    loss.

    Density and loss are interpolated linearly between measured quotas. Raises ValueError if the density
    cannot be reached.
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
        count = int(adjusted_M[left])
        chosen.append(round(float(quota_J[count]), 6))
        left -= count
    return chosen[::-1]


def least_adjusted(density_HI: torch.Tensor, quotas: Sequence[float]) -> float:
    """Return the heads' mean density after all possible adjustments."""
    return float(between(density_HI, quotas, _thresholds()[-1:]).mean())


def _thresholds() -> torch.Tensor:
    return START * FACTOR ** torch.arange(ADJUSTMENTS + 1, dtype=torch.float64)


def _table(density_HJ: torch.Tensor, loss_HJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill the paper's table.

    Returns:
        adjusted_HM: The number of adjustments of each head, if the heads up to this one have M adjustments in
            all, with minimum loss.
        density_M: The sum of all heads' densities after M adjustments.
    """
    heads, adjustments = density_HJ.shape[0], density_HJ.shape[1] - 1
    loss_M = torch.full((heads * adjustments + 1,), float("inf"), dtype=torch.float64)
    loss_M[0] = 0.0
    density_M = torch.zeros_like(loss_M)
    adjusted_HM = torch.empty(heads, len(loss_M), dtype=torch.uint8)
    for head in range(heads):
        by_J = [_later(loss_M, j, float("inf")) + loss_HJ[head, j] for j in range(adjustments + 1)]
        loss_M, adjusted_M = torch.stack(by_J).min(0)
        dense_JM = torch.stack(
            [_later(density_M, j, 0.0) + density_HJ[head, j] for j in range(adjustments + 1)]
        )
        density_M = dense_JM.gather(0, adjusted_M[None])[0]
        adjusted_HM[head] = adjusted_M.to(torch.uint8)
    return adjusted_HM, density_M


def _later(value_M: torch.Tensor, places: int, first: float) -> torch.Tensor:
    return torch.nn.functional.pad(value_M[: len(value_M) - places], (places, 0), value=first)


def between(value_HI: torch.Tensor, quotas: Sequence[float], quota_J: torch.Tensor) -> torch.Tensor:
    """Interpolate values at quota_J linearly between the measured quotas (ascending). Returns value_HJ,
    float64."""
    quota_I = torch.tensor(quotas, dtype=torch.float64)
    after_J = torch.searchsorted(quota_I, quota_J).clamp(1, len(quotas) - 1)
    low_J, high_J = quota_I[after_J - 1], quota_I[after_J]
    return torch.lerp(
        value_HI.double()[:, after_J - 1], value_HI.double()[:, after_J], (quota_J - low_J) / (high_J - low_J)
    )
