"""Which split of which request a program of paged decode attention computes.

Requests get splits in proportion to what they read, so that programs end at about the same time whatever the
lengths are: a long request beside short ones, or beside rows of padding, has nearly all programs. It follows
from lengths on the device, so a CUDA graph stays valid while they change.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from ..constants import PAGE_TOKENS

_PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def assigned(
    lengths_ptr,
    counts_ptr,
    slot,
    most,
    requests,
    STEP: tl.constexpr,
    REQUESTS: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Of `slot`: request r, its split, how many splits r has (0 where no request is left), its tokens, and
    its count of selected pages. most: splits that a request can have. Each has one, and most - 1 are shared
    out, so that slots below requests + most - 1 can be taken. No split is shorter than STEP tokens. REQUESTS:
    a power of two.
    """
    lane = tl.arange(0, REQUESTS)
    there = lane < requests
    tokens_R = tl.load(lengths_ptr + lane, mask=there, other=0)
    count_R = tokens_R
    read_R = tokens_R
    if SPARSE:
        count_R = tl.load(counts_ptr + lane, mask=there, other=0)
        read_R = tl.where(count_R > 0, count_R * _PAGE, tokens_R)
    steps_R = tl.cdiv(read_R, STEP)
    splits_R = tl.minimum(1 + steps_R * (most - 1) // tl.sum(steps_R, 0), steps_R)
    before_R = tl.cumsum(splits_R, 0) - splits_R
    mine_R = (before_R <= slot) & (slot < before_R + splits_R)
    r = tl.sum(tl.where(mine_R, lane, 0), 0)
    split = slot - tl.sum(tl.where(mine_R, before_R, 0), 0)
    own = tl.sum(tl.where(mine_R, splits_R, 0), 0)
    tokens = tl.sum(tl.where(mine_R, tokens_R, 0), 0)
    count = tl.sum(tl.where(mine_R, count_R, 0), 0)
    return r, split, own, tokens, count
