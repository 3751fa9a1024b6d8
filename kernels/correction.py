"""The Δ correction around any method. Shape suffixes as in `interface.py`; R dense rows of the chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .constants import BLOCK
from .interface import (
    Attention,
    AttentionInput,
    Coverage,
    KernelInputError,
    Phase,
    StateSpec,
    no_phase,
    runs_on_cpu,
)
from .options import option

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CorrectionOptions:
    """What `+delta` adds to a method's options (Δ Attention, Willette et al. 2025, section 3)."""

    gamma: int = option(64, 1, 4096, "every gamma-th query row is computed densely")


@dataclass
class CorrectionState:
    """The inner method's state and the last dense row's difference, float32."""

    inner: Any
    carried_BHD: torch.Tensor


class Correction:
    """Δ Attention (Willette et al. 2025), section 3, equations 5-6.

    Every gamma-th row (by absolute position) is computed densely; its difference to the sparse row is added
    to it and the gamma - 1 rows after it. The prompt's last rows (its last whole block and what follows it)
    are dense. Row numbers are absolute, so any chunking gives the same result. recompute=True is the paper's
    ablation: the gamma-th rows are replaced by the dense ones and no other row changes.
    """

    def __init__(self, inner: Attention, gamma: int, recompute: bool = False) -> None:
        if gamma < 1:
            raise KernelInputError(f"correction: gamma {gamma} is less than 1")
        self.inner = inner
        self.gamma = gamma
        self.recompute = recompute

    def new_state(self, spec: StateSpec) -> CorrectionState:
        import torch

        shape = (spec.batch, spec.q_heads, spec.head_dim)
        carried_BHD = torch.zeros(shape, dtype=torch.float32, device=spec.device)
        return CorrectionState(self.inner.new_state(spec), carried_BHD)

    def attend(
        self, x: AttentionInput, state: CorrectionState, phase: Phase = no_phase
    ) -> tuple[torch.Tensor, Coverage]:
        out_BHTD, coverage = self.inner.attend(x, state.inner, phase)
        with phase("correction"):
            self._correct(x, out_BHTD, state)
        extra = self._extra_tiles(x)
        return out_BHTD, replace(coverage, computed=coverage.computed + extra)

    def _correct(self, x: AttentionInput, out_BHTD: torch.Tensor, state: CorrectionState) -> None:
        dense_rows, add_differences = cpu_dense_rows, cpu_add_differences
        if not runs_on_cpu(x.q_BHTD, "correction"):
            from .correction_kernel import kernel_add_differences, kernel_dense_rows

            dense_rows, add_differences = kernel_dense_rows, kernel_add_differences
        first, tail = -x.q_start % self.gamma, self._tail_begin(x)
        strided_BHRD, last_BHRD = dense_rows(x, first, self.gamma, tail)
        body_BHTD = out_BHTD[:, :, :tail]
        if self.recompute:
            body_BHTD[:, :, first :: self.gamma] = strided_BHRD
        elif tail > 0:
            carried_BHD = state.carried_BHD
            state.carried_BHD = add_differences(body_BHTD, strided_BHRD, carried_BHD, first, self.gamma)
        out_BHTD[:, :, tail:] = last_BHRD

    def _tail_begin(self, x: AttentionInput) -> int:
        """First row of this chunk that belongs to the prompt's dense tail (the chunk's length if none)."""
        begin = max(0, x.prompt_tokens // BLOCK - 1) * BLOCK
        return min(max(0, begin - x.q_start), x.q_BHTD.shape[2])

    def _extra_tiles(self, x: AttentionInput) -> float:
        """Tiles' worth of products in the dense rows: each row counts 1/128 of its row of tiles."""
        batch, heads, rows, _ = x.q_BHTD.shape
        tail, first = self._tail_begin(x), -x.q_start % self.gamma
        dense = [*range(first, tail, self.gamma), *range(tail, rows)]
        tiles: int = batch * heads * sum((x.q_start + row) // BLOCK + 1 for row in dense)
        return tiles / BLOCK


def cpu_dense_rows(x: AttentionInput, first: int, gamma: int, tail: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention of the chunk's rows first, first + gamma, … below `tail`, and of all from `tail` on.

    Both in q's dtype; either may have no rows.
    """
    import torch

    from .executors.dense import cpu_attend_rows

    stop = x.q_start + x.q_BHTD.shape[2]
    every = torch.arange(x.q_start + first, max(x.q_start + tail, x.q_start + first), gamma)
    strided, last = (
        cpu_attend_rows(x, position_R) if position_R.numel() else x.q_BHTD[:, :, :0]
        for position_R in (every, torch.arange(x.q_start + tail, stop))
    )
    return strided, last


def cpu_add_differences(
    out_BHTD: torch.Tensor, dense_BHRD: torch.Tensor, carried_BHD: torch.Tensor, first: int, gamma: int
) -> torch.Tensor:
    """Add each dense row's difference to its own row and the gamma - 1 after it, in place.

    Rows before `first` take the difference carried from the chunk before. Returns what the next one carries.
    """
    import torch

    sparse_BHRD = out_BHTD[:, :, first::gamma].float()
    difference_BHRD = torch.cat([carried_BHD[:, :, None], dense_BHRD.float() - sparse_BHRD], dim=2)
    row_T = torch.arange(out_BHTD.shape[2])
    owner_T = torch.div(row_T - first, gamma, rounding_mode="floor") + 1
    out_BHTD.copy_((out_BHTD.float() + difference_BHRD[:, :, owner_T]).to(out_BHTD.dtype))
    return difference_BHRD[:, :, -1].clone()
