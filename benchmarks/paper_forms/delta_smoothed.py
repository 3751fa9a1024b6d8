"""The Δ correction of StreamingLLM with smoothed differences (Δ Attention, appendix J), optionally with the
paper's dense end (appendix C).

Shape suffixes are defined in `kernels.interface`; R dense rows, C components of the filter's state.
"""

from __future__ import annotations

import torch

from deltafront.benchmarks.paper_forms.methods import StreamingSmoothedOptions
from deltafront.kernels.attention.block_sparse import BlockSparseBackend
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.correction import cpu_dense_rows, kernel_dense_rows
from deltafront.kernels.interface import AttentionInput, KernelInputError, Phase, StateSpec, TileMask


class SmoothedBackend:
    """Computes every gamma-th row densely and adds a smoothed difference, dense minus sparse, to all rows.
    With `linear`, differences are interpolated between dense rows. Otherwise a filter runs over them, each
    repeated gamma times. The prompt must be one chunk, because `linear` needs the next dense row."""

    def __init__(self, options: StreamingSmoothedOptions) -> None:
        self._options = options
        self._inner = BlockSparseBackend()

    def new_state(self, spec: StateSpec) -> None:
        return None

    def attend(self, x: AttentionInput, mask: TileMask | None, state: None, phase: Phase) -> torch.Tensor:
        if x.q_start or x.q_BHTD.shape[2] != x.prompt_tokens:
            raise KernelInputError("streaming_smoothed looks ahead: give it the whole prompt")
        out_BHTD = self._inner.attend(x, mask, None, phase)
        with phase("correction"):
            gamma, tail = self._options.gamma, self._tail(x)
            dense_rows = kernel_dense_rows if x.q_BHTD.is_cuda else cpu_dense_rows
            strided_BHRD, last_BHRD = dense_rows(x, 0, gamma, tail)
            body_BHTD = out_BHTD[:, :, :tail]
            if tail > 0:
                difference_BHRD = strided_BHRD.float() - body_BHTD[:, :, ::gamma].float()
                body_BHTD += self._spread(difference_BHRD, tail).to(out_BHTD.dtype)
            out_BHTD[:, :, tail:] = last_BHRD
        return out_BHTD

    def _tail(self, x: AttentionInput) -> int:
        """Return the first row of the dense end of the prompt."""
        if self._options.paper_end:
            return (x.prompt_tokens - 1) // self._options.gamma * self._options.gamma
        return max(0, x.prompt_tokens // BLOCK - 1) * BLOCK

    def _spread(self, difference_BHRD: torch.Tensor, rows: int) -> torch.Tensor:
        options = self._options
        if options.linear:
            return interpolated(difference_BHRD, options.gamma, rows)
        numbers = options.alpha, options.beta, options.acceleration
        return filtered(difference_BHRD, options.gamma, rows, *numbers)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: None) -> torch.Tensor:
        """Count tiles. A dense row counts as 1/128 of the causal tiles of its query block."""
        row_T = torch.arange(x.q_BHTD.shape[2], device=x.q_BHTD.device)
        is_dense_T = (row_T % self._options.gamma == 0) | (row_T >= self._tail(x))
        tiles = (is_dense_T * (row_T // BLOCK + 1)).sum(dtype=torch.float64) / BLOCK
        return self._inner.computed_tiles(x, mask, None) + tiles * x.q_BHTD.shape[0] * x.q_BHTD.shape[1]


def interpolated(difference_BHRD: torch.Tensor, gamma: int, rows: int) -> torch.Tensor:
    """Interpolate linearly between each difference and the next. After the last one, repeat it."""
    row_T = torch.arange(rows, device=difference_BHRD.device)
    own_T = row_T // gamma
    next_T = (own_T + 1).clamp(max=difference_BHRD.shape[2] - 1)
    share_T1 = ((row_T % gamma) / max(1, gamma - 1))[:, None]
    return difference_BHRD[:, :, own_T] * (1 - share_T1) + difference_BHRD[:, :, next_T] * share_T1


def filtered(
    difference_BHRD: torch.Tensor, gamma: int, rows: int, alpha: float, beta: float, acceleration: float
) -> torch.Tensor:
    """Filter the differences, each repeated `gamma` times, by Algorithm 2. With beta and acceleration 0 the
    filter is an exponential moving average.

    A step is linear in the state (position, velocity, acceleration) and in the difference. So `gamma` steps
    with the same difference are powers of one matrix.
    """
    ahead_CC = torch.tensor([[1.0, 1.0, 0.5], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    gain_C = torch.tensor([alpha, beta, acceleration], dtype=torch.float64)
    step_CC = ahead_CC - gain_C[:, None] * ahead_CC[0]
    powers, sums = [step_CC], [gain_C]
    for _ in range(gamma - 1):
        powers.append(step_CC @ powers[-1])
        sums.append(step_CC @ sums[-1] + gain_C)
    power_TCC, sum_TC = (torch.stack(each).to(difference_BHRD) for each in (powers, sums))
    states, state_BHCD = [], torch.zeros_like(difference_BHRD[:, :, :1]).repeat(1, 1, 3, 1)
    state_BHCD[:, :, 0] = difference_BHRD[:, :, 0]
    for r in range(difference_BHRD.shape[2]):
        states.append(state_BHCD)
        own_BH1D = difference_BHRD[:, :, r, None]
        state_BHCD = power_TCC[-1] @ state_BHCD + sum_TC[-1][:, None] * own_BH1D
    position_BHRTD = torch.einsum("tc,bhrcd->bhrtd", power_TCC[:, 0], torch.stack(states, dim=2))
    position_BHRTD += sum_TC[:, 0, None] * difference_BHRD[:, :, :, None]
    return position_BHRTD.flatten(2, 3)[:, :, :rows]
