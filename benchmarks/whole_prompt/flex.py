"""FlexPrefill: each head is query-aware or vertical-slash. Shape suffixes are defined in
`kernels.interface`."""

from __future__ import annotations

import torch

from deltafront.benchmarks.paper_forms.baselines import BlockPoolSelector
from deltafront.benchmarks.paper_forms.methods import BlockPoolOptions
from deltafront.benchmarks.whole_prompt.line_selector import LineSelector
from deltafront.benchmarks.whole_prompt.lines import cpu_line_masses, heaviest_share, tiles_of_lines
from deltafront.benchmarks.whole_prompt.lines_kernel import kernel_line_masses
from deltafront.benchmarks.whole_prompt.methods import FlexOptions
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, KernelInputError, no_phase


class FlexSelector(LineSelector):
    """Selects tiles by FlexPrefill.

    Algorithm 2 compares the true block masses of the last 128 queries with an estimate from block means. A
    head is query-aware if the square root of their Jensen-Shannon divergence (natural logarithm) is below
    tau. A query-aware head keeps the heaviest tiles of its block-mean attention until they have the share
    gamma of it (Algorithm 4). Other heads keep the heaviest key blocks and the heaviest bands of distances,
    each until they have the share gamma of the last queries' mass (Algorithm 3).
    """

    name = "flex"

    def __init__(self, options: FlexOptions) -> None:
        self.gamma, self.tau = options.gamma_flex, options.tau_flex
        if not 0 < self.gamma <= 1 or not 0 <= self.tau <= 1:
            raise KernelInputError(f"gamma_flex {self.gamma} and tau_flex {self.tau} must be within 0 .. 1")
        self._pooled = BlockPoolSelector(BlockPoolOptions())

    def cpu_kept(self, x: AttentionInput) -> torch.Tensor:
        score_BHNM = self._pooled.cpu_scores(x, None, no_phase)
        return choose(*cpu_line_masses(x, BLOCK), score_BHNM, self.gamma, self.tau)

    def kernel_kept(self, x: AttentionInput) -> torch.Tensor:
        masses = kernel_line_masses(x, BLOCK)
        return choose(*masses, self._pooled.kernel_scores(x, None, no_phase), self.gamma, self.tau)


def choose(
    vertical_BHM: torch.Tensor,
    band_BHM: torch.Tensor,
    score_BHNM: torch.Tensor,
    gamma: float,
    tau: float,
) -> torch.Tensor:
    """Return bool_BHNM from the lines' masses and the block-mean scores, in torch, without a host sync."""
    true_BHM = vertical_BHM / vertical_BHM.sum(-1, keepdim=True)
    aware_BH11 = (js_distance(true_BHM, score_BHNM[:, :, -1]) < tau)[..., None, None]
    map_BHNM = heaviest_share(score_BHNM.flatten(2), gamma).view_as(score_BHNM)
    lines_BHNM = tiles_of_lines(heaviest_share(vertical_BHM, gamma), heaviest_share(band_BHM, gamma))
    return torch.where(aware_BH11, map_BHNM, lines_BHNM)


def js_distance(p_BHM: torch.Tensor, q_BHM: torch.Tensor) -> torch.Tensor:
    """Return the square root of the Jensen-Shannon divergence over the last dimension."""
    middle_BHM = (p_BHM + q_BHM) / 2
    total_BH = _divergence(p_BHM, middle_BHM) + _divergence(q_BHM, middle_BHM)
    return (total_BH / 2).clamp(min=0).sqrt()


def _divergence(p_BHM: torch.Tensor, middle_BHM: torch.Tensor) -> torch.Tensor:
    """Return the Kullback-Leibler divergence, with 0 log 0 = 0."""
    terms_BHM = torch.where(p_BHM > 0, p_BHM * (p_BHM / middle_BHM).log(), 0.0)
    return terms_BHM.sum(-1)
