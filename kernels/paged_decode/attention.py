"""Paged decode attention on whatever device the pages are on: plain torch on the CPU, Triton on a GPU.

Shape suffixes as in `pages.py`.
"""

from __future__ import annotations

import torch

from . import cpu, launch
from .pages import PagedInput, SelectedPages


def paged_attention(
    q_RHD: torch.Tensor,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    table_RP: torch.Tensor,
    lengths_R: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token of each request over all its tokens. Arguments as in `PagedInput`.

    Returns out_RHD (q's dtype) and lse_RH (fp32, natural logarithm; FlashInfer's is base 2).
    Raises KernelInputError before anything is launched.
    """
    x = PagedInput(q_RHD, k_PSGD, v_PSGD, table_RP, lengths_R, scale)
    if x.q_RHD.is_cuda:
        return launch.paged_attention(x)
    return cpu.paged_attention(x)


def paged_attention_scored(
    q_RHD: torch.Tensor,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    table_RP: torch.Tensor,
    lengths_R: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`paged_attention` that also says how much attention each page received (DELTA, Algorithm 2).

    Returns out_RHD, lse_RH and page_score_RP (fp32, as wide as the table): the attention weights of a
    token, the largest over all query heads, summed over the page's tokens; 0 past the request's pages.
    """
    x = PagedInput(q_RHD, k_PSGD, v_PSGD, table_RP, lengths_R, scale)
    if x.q_RHD.is_cuda:
        return launch.paged_attention_scored(x)
    return cpu.paged_attention_scored(x)


def paged_attention_sparse(
    q_RHD: torch.Tensor,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    table_RP: torch.Tensor,
    lengths_R: torch.Tensor,
    selected_RK: torch.Tensor,
    counts_R: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention` over some of each request's pages (DELTA, Algorithm 2, its sparse layers).

    selected_RK, counts_R: as `page_selection.select_pages` returns them, columns of the table, ascending; a
    request with a count of 0 reads all its pages.
    lengths_R stays the full length: it says which slots of the last page are filled.
    """
    x = PagedInput(q_RHD, k_PSGD, v_PSGD, table_RP, lengths_R, scale)
    selected = SelectedPages(x, selected_RK, counts_R)
    if x.q_RHD.is_cuda:
        return launch.paged_attention_sparse(selected)
    return cpu.paged_attention_sparse(selected)
