"""The Δ correction, which wraps any method (Δ Attention, Willette et al. 2025, section 3).

Shape suffixes: R dense rows of the chunk.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from deltafront.kernels.attention.dense import cpu_attend_rows
from deltafront.kernels.attention.inputs import QueryRows
from deltafront.kernels.attention.launch import launch
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import (
    Attention,
    AttentionInput,
    KernelInputError,
    Phase,
    StateSpec,
    TileCounts,
    no_phase,
    runs_on_cpu,
)
from deltafront.kernels.launches import strides


@dataclass
class CorrectionState:
    """The wrapped method's state, and the last dense row's difference: dense minus sparse output
    (float32)."""

    inner: Any
    carried_BHD: torch.Tensor


class Correction:
    """Corrects a sparse method's output (equations 4 to 7), with the dense tail of appendix C.

    Every gamma-th row, by absolute position, is computed densely. Its difference, dense minus sparse output,
    is added to that row and, times `spread`, to the gamma - 1 rows after it (1: equations 6 and 7). With 0
    the dense rows only replace the sparse ones (equation 5, the paper's "recompute"). The prompt's last full
    block and all rows after it are dense. The result does not depend on where chunks begin.
    """

    def __init__(self, inner: Attention, gamma: int, *, spread: float = 1.0) -> None:
        if gamma < 1:
            raise KernelInputError(f"correction: gamma {gamma} is less than 1")
        self.inner = inner
        self.gamma = gamma
        self.spread = spread

    def new_state(self, spec: StateSpec) -> CorrectionState:
        shape = (spec.batch, spec.q_heads, spec.head_dim)
        carried_BHD = torch.zeros(shape, dtype=torch.float32, device=spec.device)
        return CorrectionState(self.inner.new_state(spec), carried_BHD)

    def attend(
        self, x: AttentionInput, state: CorrectionState, phase: Phase = no_phase
    ) -> tuple[torch.Tensor, TileCounts]:
        out_BHTD, counts = self.inner.attend(x, state.inner, phase)
        with phase("correction"):
            self._correct(x, out_BHTD, state)
        extra = self._extra_tiles(x)
        return out_BHTD, replace(counts, computed=counts.computed + extra)

    def _correct(self, x: AttentionInput, out_BHTD: torch.Tensor, state: CorrectionState) -> None:
        dense_rows, add_differences = cpu_dense_rows, cpu_add_differences
        if not runs_on_cpu(x.q_BHTD, "correction"):
            dense_rows, add_differences = kernel_dense_rows, kernel_add_differences
        first, tail = -x.q_start % self.gamma, self._tail_begin(x)
        strided_BHRD, last_BHRD = dense_rows(x, first, self.gamma, tail)
        body_BHTD = out_BHTD[:, :, :tail]
        if not self.spread:
            body_BHTD[:, :, first :: self.gamma] = strided_BHRD
        elif tail > 0:
            added_BHRD, carried_BHD = strided_BHRD, state.carried_BHD
            if self.spread < 1:
                sparse_BHRD = body_BHTD[:, :, first :: self.gamma].float()
                added_BHRD = torch.lerp(sparse_BHRD, strided_BHRD.float(), self.spread)
            state.carried_BHD = add_differences(body_BHTD, added_BHRD, carried_BHD, first, self.gamma)
            if self.spread < 1:
                body_BHTD[:, :, first :: self.gamma] = strided_BHRD
        out_BHTD[:, :, tail:] = last_BHRD

    def _tail_begin(self, x: AttentionInput) -> int:
        """Return this chunk's first row of the dense tail, or the chunk's length if the tail begins later."""
        begin = max(0, x.prompt_tokens // BLOCK - 1) * BLOCK
        return min(max(0, begin - x.q_start), x.q_BHTD.shape[2])

    def _extra_tiles(self, x: AttentionInput) -> float:
        batch, heads, rows, _ = x.q_BHTD.shape
        tail, first = self._tail_begin(x), -x.q_start % self.gamma
        dense = [*range(first, tail, self.gamma), *range(tail, rows)]
        tiles: int = batch * heads * sum((x.q_start + row) // BLOCK + 1 for row in dense)
        return tiles / BLOCK


def cpu_dense_rows(x: AttentionInput, first: int, gamma: int, tail: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dense attention of rows first, first + gamma, … below `tail`, and of all rows from `tail`."""
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
    """Add each dense row's difference to that row and to the gamma - 1 rows after it, in place. Return
    carried_BHD for the next chunk.

    Args:
        carried_BHD: The previous chunk's last difference, for the rows before `first`.
    """
    sparse_BHRD = out_BHTD[:, :, first::gamma].float()
    difference_BHRD = torch.cat([carried_BHD[:, :, None], dense_BHRD.float() - sparse_BHRD], dim=2)
    row_T = torch.arange(out_BHTD.shape[2])
    owner_T = torch.div(row_T - first, gamma, rounding_mode="floor") + 1
    out_BHTD.copy_((out_BHTD.float() + difference_BHRD[:, :, owner_T]).to(out_BHTD.dtype))
    return difference_BHRD[:, :, -1].clone()


@triton.jit(do_not_specialize=["rows", "differences", "first", "gamma"])
def add_kernel(
    out_ptr, difference_ptr, stride_ob, stride_oh, stride_ot, heads, rows, differences, first, gamma,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add to each of ROWS rows of a head the difference of the nearest dense row at or before it."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owner = (row - first + gamma) // gamma  # 0: carried from the chunk before (first < gamma)
    dim = tl.arange(0, D)
    inside = (row < rows)[:, None]
    place = out_ptr + b * stride_ob + h * stride_oh + row.to(tl.int64)[:, None] * stride_ot + dim[None, :]
    from_ptr = (
        difference_ptr + (tl.program_id(1).to(tl.int64) * differences + owner)[:, None] * D + dim[None, :]
    )
    out = tl.load(place, mask=inside, other=0.0).to(tl.float32) + tl.load(from_ptr, mask=inside, other=0.0)
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)


def kernel_dense_rows(
    x: AttentionInput, first: int, gamma: int, tail: int
) -> tuple[torch.Tensor, torch.Tensor]:
    made = []
    for rows, row0, step in ((slice(first, tail, gamma), first, gamma), (slice(tail, None), tail, 1)):
        q_BHRD = x.q_BHTD[:, :, rows]
        out_BHRD = torch.empty(q_BHRD.shape, dtype=q_BHRD.dtype, device=q_BHRD.device)
        made.append(QueryRows(q_BHRD, out_BHRD, x.q_start + row0, step))
    present = [rows for rows in made if rows.q_BHRD.shape[2] > 0]
    if present:
        launch(x, *present)
    return made[0].out_BHRD, made[1].out_BHRD


def kernel_add_differences(
    out_BHTD: torch.Tensor, dense_BHRD: torch.Tensor, carried_BHD: torch.Tensor, first: int, gamma: int
) -> torch.Tensor:
    batch, heads, rows, dim = out_BHTD.shape
    sparse_BHRD = out_BHTD[:, :, first::gamma].float()
    difference_BHRD = torch.cat([carried_BHD[:, :, None], dense_BHRD.float() - sparse_BHRD], dim=2)
    sizes = (heads, rows, difference_BHRD.shape[2], first, gamma)
    add_kernel[(triton.cdiv(rows, 64), batch * heads)](
        out_BHTD, difference_BHRD, *strides(out_BHTD), *sizes, D=dim, ROWS=64, num_warps=4
    )
    return difference_BHRD[:, :, -1].clone()
