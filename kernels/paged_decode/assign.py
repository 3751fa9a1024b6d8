"""Splits of requests for the programs of paged decode attention, in proportion to tokens, so that they end
together.

Lengths are read on the device, so a CUDA graph stays valid.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from ..constants import PAGE_TOKENS

_PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def assigned(lengths_ptr, counts_ptr, slot, max_splits, requests, STEP: tl.constexpr, SPARSE: tl.constexpr):
    """A slot's request r, its split, r's number of splits (0: no request is left), its tokens, its
    selected pages.

    Each request has one of its at most max_splits splits, and max_splits - 1 are shared out; a slot is below
    requests + max_splits - 1. No split is shorter than STEP tokens. A scalar loop: scalars stay out of vector
    registers.
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
    """Tokens of request n, its count of selected pages, and steps of STEP tokens to read."""
    length = tl.load(lengths_ptr + n)
    count = length
    read = length
    if SPARSE:
        count = tl.load(counts_ptr + n)
        read = tl.where(count > 0, count * _PAGE, length)
    return length, count, tl.cdiv(read, STEP)
