"""Sink and window, without looking at q or k. Shape suffixes as in `kernels.interface`."""

from __future__ import annotations

from dataclasses import dataclass

from ..constants import BLOCK
from ..executors.block_sparse import BlockSparseExecutor
from ..interface import AttentionInput, KernelInputError, Phase, StateSpec, TileMask
from ..methods import register
from ..options import min_tokens, option


@dataclass(frozen=True)
class StreamingOptions:
    """StreamingLLM (Xiao et al. 2023), section 3.2. In tokens; tiles are kept whole, so a query may see up
    to 127 keys more."""

    sink: int = option(128, 1, 1 << 20, "tokens at the start that every query attends to")
    window: int = option(2048, 1, 1 << 20, "most recent tokens that every query attends to")
    min_tokens: int = min_tokens()


class StreamingSelector:
    """The same tiles for every head."""

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
                from .streaming_kernel import kernel_select

                return kernel_select(x, self.sink, self.window)
            return cpu_select(x, self.sink, self.window)


def cpu_select(x: AttentionInput, sink: int, window: int) -> TileMask:
    """Every tile that holds one of the first `sink` keys, or for some row of the query block one of its
    last `window` keys (the row's own among them)."""
    import torch

    from .rules.cpu import compact

    device = x.q_BHTD.device
    row_N1 = torch.arange(x.query_blocks, device=device)[:, None] + x.first_block
    column_M = torch.arange(x.key_blocks, device=device)
    oldest_N1 = torch.clamp(row_N1 * BLOCK - window + 1, min=0) // BLOCK
    kept_NM = (column_M <= row_N1) & ((column_M >= oldest_N1) | (column_M < -(-sink // BLOCK)))
    batch, heads = x.q_BHTD.shape[:2]
    return compact(kept_NM.expand(batch, heads, -1, -1))


register(
    "streaming",
    StreamingOptions,
    StreamingSelector,
    BlockSparseExecutor,
    source="StreamingLLM (Xiao et al. 2023), section 3.2",
    from_keys=True,
)
