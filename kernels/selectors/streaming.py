"""StreamingLLM: keeps the tiles of the attention sink and of a sliding window, without looking at q and k."""

import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, KernelInputError, Phase, StateSpec, TileMask
from deltafront.kernels.options import StreamingOptions


class StreamingSelector:
    scored_share = 0.0

    def __init__(self, options: StreamingOptions) -> None:
        self.sink, self.window = options.sink, options.window
        if self.sink < 1 or self.window < 1:
            raise KernelInputError(f"sink {self.sink} and window {self.window} must be at least 1")

    def new_state(self, spec: StateSpec) -> None:
        return None

    def select(self, x: AttentionInput, state: object, phase: Phase) -> TileMask:
        """Keep tiles that contain a sink key, or a key in the window of any row of the query block. All heads
        share one copy of the mask."""
        x.require_aligned("streaming")
        with phase("selection"):
            device, heads = x.q_BHTD.device, x.q_BHTD.shape[:2]
            row_N1 = torch.arange(x.query_blocks, device=device)[:, None] + x.first_block
            oldest_N1 = torch.clamp(row_N1 * BLOCK - self.window + 1, min=0) // BLOCK
            sink_N1 = torch.clamp(oldest_N1, max=-(-self.sink // BLOCK))
            slot_M = torch.arange(x.key_blocks, device=device)
            index_NM = torch.where(slot_M < sink_N1, slot_M, slot_M - sink_N1 + oldest_N1).to(torch.int16)
            count_N = (sink_N1 + row_N1 - oldest_N1 + 1)[:, 0].int()
            return TileMask(index_NM.expand(*heads, -1, -1), count_N.expand(*heads, -1))
