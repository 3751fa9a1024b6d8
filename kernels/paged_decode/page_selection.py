"""DELTA's page selection."""

from __future__ import annotations

import torch

from ..constants import PAGE_TOKENS
from ..interface import KernelInputError
from . import cpu, selection_kernel
from .pages import check_per_request

MAX_PAGES = 1 << 16
"""Columns that one call can rank on a GPU (1,048,576 tokens)."""


def select_pages(
    page_score_RP: torch.Tensor,
    lengths_R: torch.Tensor,
    *,
    budget: int,
    recency: int,
    page_tokens: int = PAGE_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages that sparse layers attend to (DELTA, Algorithm 2): K = budget, L = recency.

    The last L pages and the K - L best-scored others; of equal scores the lower column. No host sync.

    Args:
        page_score_RP: fp32; columns past ceil(length / 16) are ignored.
        lengths_R: int32, tokens.

    Returns:
        selected_RK (int32, ascending columns; 0 after the count) and counts_R (int32, min(K, pages)).

    Raises:
        KernelInputError: before anything is launched.
    """
    if page_score_RP.dim() != 2 or page_score_RP.numel() == 0:
        raise KernelInputError(f"page scores must be (requests, pages), not {tuple(page_score_RP.shape)}")
    requests, device = page_score_RP.shape[0], page_score_RP.device
    check_per_request("page scores", page_score_RP, 2, requests, device)
    check_per_request("lengths", lengths_R, 1, requests, device)
    if page_score_RP.dtype != torch.float32 or lengths_R.dtype != torch.int32:
        raise KernelInputError(
            f"page scores must be float32 and lengths int32, not {page_score_RP.dtype} and {lengths_R.dtype}"
        )
    if page_tokens != PAGE_TOKENS:
        raise KernelInputError(f"page_tokens {page_tokens}: a page holds {PAGE_TOKENS} tokens")
    if not 0 <= recency <= budget or budget < 1:
        raise KernelInputError(f"budget {budget} must be at least 1 and recency {recency} within 0 .. budget")
    if page_score_RP.is_cuda:
        if page_score_RP.shape[1] > MAX_PAGES:
            raise KernelInputError(f"{page_score_RP.shape[1]} pages a request, at most {MAX_PAGES}")
        return selection_kernel.select_pages(page_score_RP, lengths_R, budget=budget, recency=recency)
    return cpu.select_pages(page_score_RP, lengths_R, budget=budget, recency=recency)
