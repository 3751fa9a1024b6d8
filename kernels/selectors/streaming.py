"""Sink and window (StreamingLLM), without a look at q or k.

Suffixes: W columns at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..constants import BLOCK
from ..interface import AttentionInput, KernelInputError, Phase, StateSpec, TileMask
from ..options import StreamingOptions
from .rules.cpu import compact
from .rules.kernel import empty_mask


class StreamingSelector:
    sampled = 0.0

    def __init__(self, options: StreamingOptions) -> None:
        self.sink, self.window = options.sink, options.window
        if self.sink < 1 or self.window < 1:
            raise KernelInputError(f"sink {self.sink} and window {self.window} must be at least 1")

    def new_state(self, spec: StateSpec) -> None:
        return None

    def select(self, x: AttentionInput, state: object, phase: Phase) -> TileMask:
        x.require_aligned("streaming")
        with phase("selection"):
            if x.q_BHTD.is_cuda:
                return kernel_select(x, self.sink, self.window)
            return cpu_select(x, self.sink, self.window)


def cpu_select(x: AttentionInput, sink: int, window: int) -> TileMask:
    """Tiles with one of the first `sink` keys, or one of the last `window` keys of some row of the query
    block."""
    device = x.q_BHTD.device
    row_N1 = torch.arange(x.query_blocks, device=device)[:, None] + x.first_block
    column_M = torch.arange(x.key_blocks, device=device)
    oldest_N1 = torch.clamp(row_N1 * BLOCK - window + 1, min=0) // BLOCK
    kept_NM = (column_M <= row_N1) & ((column_M >= oldest_N1) | (column_M < -(-sink // BLOCK)))
    batch, heads = x.q_BHTD.shape[:2]
    return compact(kept_NM.expand(batch, heads, -1, -1))


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
