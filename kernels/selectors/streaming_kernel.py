"""Sink and window tiles on the GPU. Shape suffixes as in `kernels.interface`; W columns at once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from ..constants import BLOCK
from ..interface import AttentionInput, TileMask
from .rules.kernel import empty_mask

_BLOCK = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=["query_blocks", "key_blocks", "first_block", "sink_blocks", "window"])
def _streaming_kernel(
    index_ptr, count_ptr, query_blocks, key_blocks, first_block, sink_blocks, window, W: tl.constexpr
):
    """One row of the mask: the sink's blocks, then those from the window's oldest key to the diagonal."""
    row = tl.program_id(0)
    diagonal = first_block + row
    oldest = tl.maximum(diagonal * _BLOCK - window + 1, 0) // _BLOCK
    sink = tl.minimum(sink_blocks, oldest)
    count = sink + diagonal - oldest + 1
    line = tl.program_id(1).to(tl.int64) * query_blocks + row
    index_ptr += line * key_blocks
    for start in range(0, count, W):
        slot_W = start + tl.arange(0, W)
        block_W = tl.where(slot_W < sink, slot_W, slot_W - sink + oldest)
        tl.store(index_ptr + slot_W, block_W.to(tl.int16), mask=slot_W < count)
    tl.store(count_ptr + line, count)


def kernel_select(x: AttentionInput, sink: int, window: int) -> TileMask:
    """See `streaming.cpu_select`."""
    mask = empty_mask(x)
    batch, heads, query_blocks, key_blocks = mask.index_BHNM.shape
    _streaming_kernel[(query_blocks, batch * heads)](
        mask.index_BHNM,
        mask.count_BHN,
        query_blocks,
        key_blocks,
        x.first_block,
        -(-sink // BLOCK),
        window,
        W=128,
        num_warps=1,
    )
    return mask


_STREAMING = {
    "index_ptr": "*i16",
    "count_ptr": "*i32",
    **dict.fromkeys(("query_blocks", "key_blocks", "first_block", "sink_blocks", "window"), "i32"),
}

COMPILE_CASES = [(_streaming_kernel, _STREAMING, {"W": 128})]
"""What tests/kernels compiles for sm_90: function, types of its arguments, constants."""
