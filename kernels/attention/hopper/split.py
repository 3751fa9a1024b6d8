"""Split keys for few query rows (Flash-Decoding, Dao et al. 2023).

A few rows of a long prompt, such as a question or the Δ correction's dense rows, are too few items for all
multiprocessors. So each item's key tiles are cut into splits, which are items of their own, and the splits'
outputs are merged by their log-sum-exps (LSE).

Shape suffixes: P splits of all sequences, R rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from deltafront.kernels.attention.flash import NEGATIVE
from deltafront.kernels.launches import Launcher, cdiv, strides

_START = 8
"""Fixed time of an item, in the time of a key tile: for queries, the first scores and the output."""
_MAX_SPLITS = 16
_MERGED_ROWS = 16
"""Rows that a program merges."""


def few(items: int, programs: int) -> bool:
    """Say whether to split keys. It depends on no prompt's length, so that a warm-up compiles what requests
    need."""
    return 2 * items <= programs


def splits_of(items: int, tiles: int, shortest: int, programs: int) -> int:
    """Return the number of splits with the shortest expected time.

    Args:
        items: Items before the cut.
        tiles: Key tiles of the longest item.
        shortest: Key tiles of the shortest item. Each split of it has at least one.
        programs: Items that run at once.
    """

    def time(splits: int) -> int:
        return cdiv(items * splits, programs) * (cdiv(tiles, splits) + _START)

    return min(range(1, min(_MAX_SPLITS, shortest) + 1), key=time)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_splits_kernel(
    split_ptr, lse_ptr, out_ptr, stride_ob, stride_oh, stride_or, heads, rows, splits,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of ROWS rows of one head."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, D)
    inside = row < rows
    acc = tl.zeros([ROWS, D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    most = tl.full([ROWS], NEGATIVE, tl.float32)
    for split in range(splits):
        place = ((b * splits + split) * heads + h) * rows + row
        lse = tl.load(lse_ptr + place, mask=inside, other=NEGATIVE)
        out = tl.load(split_ptr + place[:, None] * D + dim[None, :], mask=inside[:, None], other=0.0)
        higher = tl.maximum(most, lse)
        old, new = tl.exp2(most - higher), tl.exp2(lse - higher)
        acc = acc * old[:, None] + out.to(tl.float32) * new[:, None]
        total = total * old + new
        most = higher
    place = out_ptr + b * stride_ob + h * stride_oh + row.to(tl.int64)[:, None] * stride_or + dim[None, :]
    tl.store(place, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])


_merge = Launcher(merge_splits_kernel)


def merge_splits(split_PHRD: torch.Tensor, lse_PHR: torch.Tensor, out_BHRD: torch.Tensor) -> None:
    """Write the attention over all keys from the attention over each split of them.

    Args:
        split_PHRD: Each split's output, contiguous, the splits of a sequence together.
        lse_PHR: float32, each split's base-2 log-sum-exps, contiguous. A split in which a row has no key has
            about NEGATIVE and zeros; at least one split of a row has keys.
    """
    batch, heads, rows, dim = out_BHRD.shape
    _merge[(cdiv(rows, _MERGED_ROWS), batch * heads)](
        split_PHRD, lse_PHR, out_BHRD, *strides(out_BHRD), heads, rows, len(split_PHRD) // batch,
        D=dim, ROWS=_MERGED_ROWS, num_warps=4,
    )  # fmt: skip
