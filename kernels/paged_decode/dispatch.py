"""Paged decode attention: torch on the CPU, Triton on a GPU."""

import torch

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.layers.kv_int8 import Scales
from deltafront.kernels.paged_decode import cpu, launch
from deltafront.kernels.paged_decode.pages import PagedInput, SelectedPages


def paged_attention(
    q_RHD: torch.Tensor,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    table_RP: torch.Tensor,
    lengths_R: torch.Tensor,
    *,
    scale: float,
    scales: Scales | None = None,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of each request's query token over its whole KV cache or a window.

    `PagedInput` explains the arguments and raises KernelInputError.

    Returns:
        out_RHD (q's dtype) and lse_RH (fp32, natural logarithm).
    """
    x = PagedInput(q_RHD, k_PSGD, v_PSGD, table_RP, lengths_R, scale, scales, window)
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
    scales: Scales | None = None,
    span: int = PAGE_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `paged_attention` and the attention weight that each page received (DELTA, Algorithm 2).

    Args:
        span: Tokens per score. 16 gives page scores. 1 gives token scores, which the ranks of a
            tensor-parallel worker combine over heads.

    Returns:
        out_RHD, lse_RH and score_RS (fp32), S = 16 P / span. A score is the sum over the span's tokens of
            each token's largest weight over all query heads; 0 past the request's pages.
    """
    x = PagedInput(q_RHD, k_PSGD, v_PSGD, table_RP, lengths_R, scale, scales)
    if x.q_RHD.is_cuda:
        return launch.paged_attention_scored(x, span=span)
    return cpu.paged_attention_scored(x, span)


def paged_attention_sparse(
    q_RHD: torch.Tensor,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    table_RP: torch.Tensor,
    lengths_R: torch.Tensor,
    *,
    selected_RK: torch.Tensor,
    counts_R: torch.Tensor,
    scale: float,
    scales: Scales | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `paged_attention` over selected pages of each request (DELTA, Algorithm 1, sparse layers).

    Args:
        lengths_R: The requests' full lengths in tokens.
        selected_RK, counts_R: From `page_selection.select_pages`. Count 0: attend to all pages.
    """
    x = PagedInput(q_RHD, k_PSGD, v_PSGD, table_RP, lengths_R, scale, scales)
    selected = SelectedPages(x, selected_RK, counts_R)
    if x.q_RHD.is_cuda:
        return launch.paged_attention_sparse(selected)
    return cpu.paged_attention_sparse(selected)
