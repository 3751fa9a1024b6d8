"""DELTA's page selection in Triton, without a sort: bisection over the scores' bits, then a prefix sum."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..constants import PAGE_TOKENS

_PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def _select(
    score_ptr, lengths_ptr, selected_ptr, counts_ptr, stride_sr, columns, budget, recency,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Program r. N, K: powers of two, N at least the columns and K, K at least the budget."""
    r = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, N)
    score = tl.load(score_ptr + r * stride_sr + column, mask=column < columns, other=0.0)
    pages = (tl.load(lengths_ptr + r) + _PAGE - 1) // _PAGE
    rivals = tl.where(pages <= budget, 0, pages - recency)  # columns that compete; the later ones are kept
    rival = column < rivals
    wanted = budget - recency

    bits = (score + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0 becomes 0, so that they tie
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.uint32, bitcast=True)
    rank = tl.where(rival, ordered ^ 0x80000000, 0)  # unsigned, in the order of the scores

    # The wanted-th largest rank lies in lowest .. highest: K groups of columns each have a rank
    # at or above the lowest of their maxima, and K >= wanted.
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
    # Both running counts in one word; each is below 2^16 before any column.
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


def select_pages(
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
