"""Launches paged decode attention.

Grids and scratch buffers depend only on shapes, so a CUDA graph stays valid while lengths, page tables and
selected pages change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from deltafront.kernels.constants import DECODE_HEAD_DIMS, LOG2E, PAGE_TOKENS
from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.launches import strides
from deltafront.kernels.paged_decode import kernel, kernel_int8
from deltafront.kernels.paged_decode.pages import PagedInput, SelectedPages

_PROGRAMS = 264
"""Programs of `_attend`: two for each of an H200's multiprocessors."""
_WIDEST = 128
"""Maximum number of keys per block."""
_FIRST_SPLITS = 8
"""Splits that `_merge` loads first. Each of four requests with eight KV heads has this number."""


@dataclass(frozen=True)
class SplitPlan:
    """Sizes and launch options of paged decode.

    Attributes:
        block: Keys per block.
        splits: Programs per KV head. Together they read all requests' keys once, in equal shares.
        warps, stages: Triton's options for `_attend`.
        score_blocks: Blocks per program of `_score`.
        score_warps: Warps of `_score`.
    """

    block: int
    splits: int
    warps: int = 4
    stages: int = 3
    score_blocks: int = 1
    score_warps: int = 1

    @classmethod
    def of(cls, x: PagedInput, pages: int) -> SplitPlan:
        """Choose a plan for requests of at most `pages` pages. The rules were tuned beforehand on an H200
        (docs/log/2026-11-21.md at 4fe709c6)."""
        row_bytes = x.k_PSGD.shape[3] * x.k_PSGD.element_size()
        block = _WIDEST if row_bytes <= 128 else 64 if row_bytes <= 512 else 32
        blocks = x.q_RHD.shape[0] * -(-pages * PAGE_TOKENS // block)
        score_warps = 1 if x.scales is None else 4  # with scales, p has 32 bits
        splits = min(blocks, max(1, _PROGRAMS // x.k_PSGD.shape[2]))
        return cls(block, splits, score_warps=score_warps)


def paged_attention(x: PagedInput, plan: SplitPlan | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    columns = x.table_RP.shape[1]
    if x.window:  # one block more, because a window may begin within a block
        columns = min(columns, -(-x.window // PAGE_TOKENS) + _WIDEST // PAGE_TOKENS)
    plan = plan or SplitPlan.of(x, columns)
    return _attend(x, None, plan, _scratch(x, plan, 0))


def paged_attention_sparse(
    selection: SelectedPages, plan: SplitPlan | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    x = selection.x
    plan = plan or SplitPlan.of(x, x.table_RP.shape[1])  # a request may read all its pages
    return _attend(x, selection, plan, _scratch(x, plan, 0))


def paged_attention_scored(
    x: PagedInput, plan: SplitPlan | None = None, span: int = PAGE_TOKENS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    columns = x.table_RP.shape[1]
    plan = plan or SplitPlan.of(x, columns)
    blocks = -(-columns * PAGE_TOKENS // plan.block)
    p_RBHT, m_REHW = scratch = _scratch(x, plan, -(-blocks // kernel.BUNDLE))
    out_RHD, lse_RH = _attend(x, None, plan, scratch)
    requests, bundles, heads, _ = m_REHW.shape
    scores = columns * PAGE_TOKENS // span
    score_RS = torch.empty((requests, scores), dtype=torch.float32, device=x.q_RHD.device)
    kernel._score[(-(-blocks // plan.score_blocks), requests)](
        p_RBHT,
        m_REHW,
        lse_RH,
        x.lengths_R,
        score_RS,
        heads,
        scores,
        bundles,
        H=triton.next_power_of_2(heads),
        BLOCK=plan.block,
        BLOCKS=plan.score_blocks,
        SPAN=span,
        num_warps=plan.score_warps,
    )
    return out_RHD, lse_RH, score_RS


def _scratch(x: PagedInput, plan: SplitPlan, bundles: int) -> tuple[torch.Tensor, torch.Tensor]:
    requests, heads, _ = x.q_RHD.shape
    # With tiny values in 8-bit pages, p exceeds the range of 16-bit floats.
    kind = x.k_PSGD.dtype if x.scales is None else torch.float32
    p_RBHT = x.q_RHD.new_empty((requests, kernel.BUNDLE * bundles, heads, plan.block), dtype=kind)
    m_REHW = torch.empty(
        (requests, bundles, heads, kernel.BUNDLE), dtype=torch.float32, device=x.q_RHD.device
    )
    return p_RBHT, m_REHW


def _attend(
    x: PagedInput,
    selection: SelectedPages | None,
    plan: SplitPlan,
    scratch: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    requests, heads, dim = x.q_RHD.shape
    if dim not in DECODE_HEAD_DIMS:
        raise KernelInputError(f"head dimension {dim} is not one of {DECODE_HEAD_DIMS}")
    _, m_REHW = scratch
    # A multiple of the requests, so that equal ones are cut alike.
    slots = plan.splits - plan.splits % requests if plan.splits > requests else plan.splits
    splits = (requests, heads, slots)
    acc_RHCD = torch.empty((*splits, dim), dtype=torch.float32, device=x.q_RHD.device)
    m_RHC = torch.empty(splits, dtype=torch.float32, device=x.q_RHD.device)
    l_RHC = torch.empty(splits, dtype=torch.float32, device=x.q_RHD.device)
    splits_R = torch.empty((requests,), dtype=torch.int32, device=x.q_RHD.device)
    chosen, counts, chosen_stride = x.table_RP, x.lengths_R, 0
    if selection is not None:
        chosen, counts = selection.selected_RK, selection.counts_R
        chosen_stride = chosen.stride(0)
    splits_of = (acc_RHCD, m_RHC, l_RHC, splits_R)
    grid = x.k_PSGD.shape[2], slots
    what = (
        x.table_RP,
        x.lengths_R,
        chosen,
        counts,
        *splits_of,
        *scratch,
        x.scale * LOG2E,
        *x.q_RHD.stride()[:2],
    )
    sizes = x.table_RP.stride(0), chosen_stride, m_REHW.shape[1], requests
    constants = {
        "GROUP": x.group,
        "ROWS": max(16, triton.next_power_of_2(x.group)),
        "D": dim,
        "BLOCK": plan.block,
        "SPARSE": selection is not None,
        "SCORED": m_REHW.shape[1] > 0,
        "WINDOW": x.window,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }
    if x.scales is None:
        apart = strides(x.k_PSGD, x.v_PSGD)
        kernel._attend[grid](x.q_RHD, x.k_PSGD, x.v_PSGD, *what, *apart, *sizes, **constants)
    else:
        k_pairs, v_pairs = x.k_PSGD.view(torch.int16), x.v_PSGD.view(torch.int16)
        apart = [*strides(k_pairs), *x.scales.k.stride()[:2]]
        kernel_int8._attend_int8[grid](
            x.q_RHD, k_pairs, v_pairs, x.scales.k, x.scales.v, *what, *apart, *sizes, **constants
        )
    out_RHD = torch.empty((requests, heads, dim), dtype=x.q_RHD.dtype, device=x.q_RHD.device)
    lse_RH = torch.empty((requests, heads), dtype=torch.float32, device=x.q_RHD.device)
    kernel._merge[(requests * heads,)](
        *splits_of,
        out_RHD,
        lse_RH,
        slots,
        heads,
        C=_FIRST_SPLITS,
        M=triton.next_power_of_2(max(1, slots - _FIRST_SPLITS)),
        D=dim,
        num_warps=4,
    )
    return out_RHD, lse_RH
