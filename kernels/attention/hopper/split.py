"""Split keys for few query rows (Flash-Decoding, Dao et al. 2023).

A few rows of a long prompt, such as a question or the Δ correction's dense rows, are too few items for all
multiprocessors. So each item's key tiles are cut into parts, which are items of their own, and the parts'
outputs are merged by their logarithms of sums.

Shape suffixes: P parts of B sequences, R rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from deltafront.kernels.launches import Launcher, cdiv, strides

_START = 8
"""What an item costs beside its tiles, in tiles: queries, the first scores and the output."""
_MOST = 16
_ROWS = 16


def few(items: int, programs: int) -> bool:
    """Say whether to split keys. It depends on no prompt's length, so that a warm-up compiles what requests
    need."""
    return 2 * items <= programs


def parts_of(items: int, tiles: int, shortest: int, programs: int) -> int:
    """Return the number of parts with the shortest expected time.

    Args:
        items: Items before the cut.
        tiles: Key tiles of the longest item.
        shortest: Key tiles of the shortest item. Each part of it has at least one.
        programs: Items that run at once.
    """

    def time(parts: int) -> int:
        return cdiv(items * parts, programs) * (cdiv(tiles, parts) + _START)

    return min(range(1, min(_MOST, shortest) + 1), key=time)


@triton.jit(do_not_specialize=["rows", "parts"])
def merge_parts_kernel(
    part_ptr, lse_ptr, out_ptr, stride_ob, stride_oh, stride_or, heads, rows, parts,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of ROWS rows of one head."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, D)
    inside = row < rows
    acc = tl.zeros([ROWS, D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    most = tl.full([ROWS], -1.0e30, tl.float32)
    for part in range(parts):
        place = ((b * parts + part) * heads + h) * rows + row
        lse = tl.load(lse_ptr + place, mask=inside, other=-1.0e30)
        out = tl.load(part_ptr + place[:, None] * D + dim[None, :], mask=inside[:, None], other=0.0)
        higher = tl.maximum(most, lse)
        old, new = tl.exp2(most - higher), tl.exp2(lse - higher)
        acc = acc * old[:, None] + out.to(tl.float32) * new[:, None]
        total = total * old + new
        most = higher
    place = out_ptr + b * stride_ob + h * stride_oh + row.to(tl.int64)[:, None] * stride_or + dim[None, :]
    tl.store(place, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])


_merge = Launcher(merge_parts_kernel)


def merge_parts(part_PHRD: torch.Tensor, lse_PHR: torch.Tensor, out_BHRD: torch.Tensor) -> None:
    """Write the attention over all keys from the attention over each part of them.

    Args:
        part_PHRD: Each part's output, contiguous, the parts of a sequence together.
        lse_PHR: float32, the base-2 logarithms of the parts' sums of weights, contiguous. At least one part
            of a row has a key; a part without has about -1e30 and zeros.
    """
    batch, heads, rows, dim = out_BHRD.shape
    _merge[(cdiv(rows, _ROWS), batch * heads)](
        part_PHRD, lse_PHR, out_BHRD, *strides(out_BHRD), heads, rows, len(part_PHRD) // batch,
        D=dim, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
