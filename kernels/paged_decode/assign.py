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
def assigned(lengths_ptr, counts_ptr, slot, max_splits, requests, STEP: tl.constexpr, SPARSE: tl.constexpr):
    """Of `slot`: request r, its split, how many splits r has (0 where no request is left), its tokens, and
    its count of selected pages. most: splits that a request can have. Each has one, and most - 1 are shared
    out, so that slots below requests + most - 1 can be taken. No split is shorter than STEP tokens.

    One number after the other, and not a vector of all requests: what comes of numbers that a whole program
    loads and computes alike stays out of vector registers, also in the loop over keys that it bounds.
    """
    total = 0
    for n in range(requests):
        _length, _count, steps = _read(lengths_ptr, counts_ptr, n, STEP, SPARSE)
        total += steps
    r = 0
    split = slot
    splits = 0
    tokens = 0
    count = 0
    first_slot = 0
    read = 0
    shared = 0
    for n in range(requests):
        length, chosen, steps = _read(lengths_ptr, counts_ptr, n, STEP, SPARSE)
        read += steps
        until = read * (max_splits - 1) // total  # rounded so, nothing of what is shared out is lost
        splits_n = tl.minimum(1 + until - shared, steps)
        shared = until
        is_own = (first_slot <= slot) & (slot < first_slot + splits_n)
        r = tl.where(is_own, n, r)
        split = tl.where(is_own, slot - first_slot, split)
        splits = tl.where(is_own, splits_n, splits)
        tokens = tl.where(is_own, length, tokens)
        count = tl.where(is_own, chosen, count)
        first_slot += splits_n
    return r, split, splits, tokens, count


@triton.jit
def _read(lengths_ptr, counts_ptr, n, STEP: tl.constexpr, SPARSE: tl.constexpr):
    """Of request n: its tokens, its count of selected pages, and what it reads in steps of STEP tokens."""
    length = tl.load(lengths_ptr + n)
    count = length
    read = length
    if SPARSE:
        count = tl.load(counts_ptr + n)
        read = tl.where(count > 0, count * _PAGE, length)
    return length, count, tl.cdiv(read, STEP)
