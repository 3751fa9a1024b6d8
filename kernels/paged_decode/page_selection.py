"""Page selection of DELTA, a sparse decode method."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.paged_decode import cpu
from deltafront.kernels.paged_decode.pages import check_per_request

_PAGE = tl.constexpr(PAGE_TOKENS)
MAX_PAGES = 1 << 16
"""Maximum number of pages per request on a GPU (1,048,576 tokens)."""


def select_pages(
    page_score_RP: torch.Tensor,
    lengths_R: torch.Tensor,
    *,
    budget: int,
    recency: int,
    page_tokens: int = PAGE_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the pages that sparse layers attend to (DELTA, Algorithm 2): K = budget, L = recency.

    Selected are the last L pages and the K - L other pages with the best scores. Ties go to the lower column.
    The host does not wait for the device. Raises KernelInputError.

    Args:
        page_score_RP: fp32. Columns after a request's last page are ignored.
        lengths_R: int32, tokens.

    Returns:
        selected_RK (int32, ascending columns; 0 after the count) and counts_R (int32, min(K, pages)).
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
        return kernel_select_pages(page_score_RP, lengths_R, budget=budget, recency=recency)
    return cpu.select_pages(page_score_RP, lengths_R, budget=budget, recency=recency)


@triton.jit
def _select(
    score_ptr, lengths_ptr, selected_ptr, counts_ptr, stride_sr, columns, budget, recency,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Select the pages of request r, the program's number, by bisection over the scores' bits and a prefix
    sum.

    N, K: Powers of two with N >= columns, N >= K and K >= budget.
    """
    r = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, N)
    score = tl.load(score_ptr + r * stride_sr + column, mask=column < columns, other=0.0)
    pages = (tl.load(lengths_ptr + r) + _PAGE - 1) // _PAGE
    rivals = tl.where(pages <= budget, 0, pages - recency)  # columns to rank; later ones are always selected
    rival = column < rivals
    wanted = budget - recency

    bits = (score + 0.0).to(tl.int32, bitcast=True)  # + 0.0 turns -0 into 0, so that -0 and 0 tie
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.uint32, bitcast=True)
    rank = tl.where(rival, ordered ^ 0x80000000, 0)  # unsigned, in the order of the scores

    # The wanted-th largest rank is at least the smallest of K groups' maxima, because K >= wanted.
    group = tl.max(tl.reshape(rank, [N // K, K], can_reorder=True), 0)
    lowest, highest = tl.min(group, 0), tl.max(group, 0)
    while lowest < highest:
        middle = highest - (highest - lowest) // 2
        reached = tl.sum((rank >= middle).to(tl.int32), 0)
        lowest = tl.where(reached >= wanted, middle, lowest)
        highest = tl.where(reached > wanted, highest, tl.where(reached == wanted, middle, middle - 1))

    sure = (rival & (rank > lowest)) | ((column >= rivals) & (column < pages))
    tied = rival & (rank == lowest)
    ties_wanted = (wanted - tl.sum((rank > lowest).to(tl.int32), 0)).to(tl.uint32)
    # Compute both running counts in one word. Each is below 2^16 before any column.
    word = sure.to(tl.uint32) + (tied.to(tl.uint32) << 16)
    before = tl.cumsum(word, 0) - word
    ties = before >> 16
    kept = sure | (tied & (ties < ties_wanted))
    place = (before & 0xFFFF) + tl.minimum(ties, ties_wanted)
    selected = selected_ptr + r * budget
    tl.store(selected + place.to(tl.int32), column, mask=kept)

    count = tl.minimum(pages, budget)
    tl.store(counts_ptr + r, count)
    rest = tl.arange(0, K)
    tl.store(selected + rest, tl.zeros([K], tl.int32), mask=(rest >= count) & (rest < budget))


def kernel_select_pages(
    page_score_RP: torch.Tensor, lengths_R: torch.Tensor, *, budget: int, recency: int
) -> tuple[torch.Tensor, torch.Tensor]:
    requests, columns = page_score_RP.shape
    selected_RK = torch.empty((requests, budget), dtype=torch.int32, device=page_score_RP.device)
    counts_R = torch.empty((requests,), dtype=torch.int32, device=page_score_RP.device)
    slots = triton.next_power_of_2(budget)
    size = max(128, slots, triton.next_power_of_2(columns))
    _select[(requests,)](
        page_score_RP,
        lengths_R,
        selected_RK,
        counts_R,
        page_score_RP.stride(0),
        columns,
        budget,
        recency,
        N=size,
        K=slots,
        num_warps=min(32, max(4, size // 1024)),
    )
    return selected_RK, counts_R
