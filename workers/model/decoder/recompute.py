"""Finds the blocks of a sparsely prefilled document that a question attends to, and attends densely from
them, so that their KV can be recomputed.

Sources: selective recomputation (CacheBlend, Yao et al. 2024, section 4), and replacing KV by that of dense
prefill (Rectified Sparse Attention, Sun et al. 2025, section 2.3).

Shape suffixes also: M blocks of BLOCK keys, P rows of B recomputed blocks.
"""

from collections.abc import Sequence
from itertools import count

import torch

from deltafront.kernels.attention.block_sparse import BlockSparseBackend
from deltafront.kernels.attention.dense import DenseBackend
from deltafront.kernels.attention.inputs import window_begin
from deltafront.kernels.block_mass import attention_by_block
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, TileMask, no_phase
from deltafront.workers.model.decoder.collectives import SINGLE_RANK, Collectives
from deltafront.workers.model.decoder.stack import LayerStack

QUESTION_ROWS = 64


class BlockAttention:
    """Finds the blocks that a question's last tokens attend to most.

    In each layer, a block's mass is the largest share of attention that any query gives it in any head on any
    rank. Blocks are ranked by the mean of this mass over all layers without a sliding window. The maximum
    over layers would be dominated by single heads that attend only by position.
    """

    def __init__(self, tokens: int, collectives: Collectives = SINGLE_RANK) -> None:
        self._tokens = tokens
        self._collectives = collectives
        self._masses_M: list[torch.Tensor] = []

    def add(self, q_THD: torch.Tensor, k_GSD: torch.Tensor) -> None:
        """Add a layer's attention. q_THD must be rotated. Only the first `tokens` keys count."""
        self._masses_M.append(attention_by_block(q_THD[-QUESTION_ROWS:], k_GSD[:, : self._tokens]))

    def mass(self) -> torch.Tensor:
        """Return mass_LM (float32) over all ranks, with a row for each added layer. All ranks must call
        this."""
        return self._collectives.max(torch.stack(self._masses_M))

    def most_attended(self, count: int) -> list[int]:
        """Return at most `count` complete blocks, ascending. All ranks must call this.

        Block 0 is never chosen, because sparse prefill computes it densely. The last block ranks last, since
        local heads give it most of their attention.
        """
        complete = self._tokens // BLOCK
        if not self._masses_M or complete < 2:
            return []
        mass_M = self.mass()[:, 1:complete].mean(0)
        mass_M[-1] = -1.0
        best = mass_M.topk(min(count, complete - 1)).indices
        return sorted(1 + block for block in best.tolist())


def rows_of_blocks(blocks: Sequence[int], device: torch.device | str) -> torch.Tensor:
    first_B1 = torch.tensor(blocks, device=device)[:, None] * BLOCK
    return (first_B1 + torch.arange(BLOCK, device=device)).flatten()


class BlockQueries:
    """Dense attention of blocks' queries to all earlier tokens and to their own.

    Keys and values are those of the sequence from its start, then the blocks' own new ones from block number
    `own` on, which is at least the last block's.

    Args:
        blocks: Complete blocks, ascending.
    """

    def __init__(self, stack: LayerStack, blocks: Sequence[int], own: int) -> None:
        self._stack, self._blocks, self._own = stack, blocks, own
        self._mask = _tiles_before(blocks, own, stack.config.q_heads, stack.device)
        self._backend = BlockSparseBackend()

    def attend(
        self, layer: int, q_PHD: torch.Tensor, k_GSD: torch.Tensor, v_GSD: torch.Tensor
    ) -> torch.Tensor:
        windows, sink_H = self._stack.config.windows, self._stack.sinks(layer)
        if layer in windows:
            return _attend_to_windows(q_PHD, k_GSD, v_GSD, self._blocks, self._own, windows[layer], sink_H)
        q_BHTD, start = q_PHD.transpose(0, 1)[None].to(k_GSD.dtype), self._own * BLOCK
        x = AttentionInput.of(q_BHTD, k_GSD[None], v_GSD[None], q_start=start, sink_H=sink_H)
        out_BHTD = self._backend.attend(x, self._mask, None, no_phase)
        return out_BHTD[0].transpose(0, 1).to(q_PHD.dtype)


def _attend_to_windows(
    q_PHD: torch.Tensor,
    k_GSD: torch.Tensor,
    v_GSD: torch.Tensor,
    blocks: Sequence[int],
    own: int,
    window: int,
    sink_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attend block by block. Each block attends to the keys in its window before it, and to its own new
    keys."""
    parts, backend = [], DenseBackend(window=window)
    for block, new, q_THD in zip(blocks, count(own), torch.split(q_PHD, BLOCK), strict=False):
        before, fresh = (
            slice(first * BLOCK, end * BLOCK)
            for first, end in ((window_begin(block, window), block), (new, new + 1))
        )
        k_BGSD, v_BGSD = (torch.cat([x[:, before], x[:, fresh]], dim=1)[None] for x in (k_GSD, v_GSD))
        q_BHTD = q_THD.transpose(0, 1)[None].to(k_GSD.dtype)
        x = AttentionInput.of(q_BHTD, k_BGSD, v_BGSD, sink_H=sink_H)
        parts.append(backend.attend(x, None, None, no_phase)[0].transpose(0, 1).to(q_PHD.dtype))
    return torch.cat(parts)


def _tiles_before(blocks: Sequence[int], own: int, heads: int, device: torch.device) -> TileMask:
    """Return the mask with which each block attends to all blocks before it and to its own new keys."""
    index_BM = torch.arange(blocks[-1] + 1, dtype=torch.int16).repeat(len(blocks), 1)
    for n, block in enumerate(blocks):
        index_BM[n, block] = own + n
    count_B = torch.tensor(blocks, dtype=torch.int32) + 1
    index_BHNM = index_BM.to(device).expand(1, heads, -1, -1).contiguous()
    return TileMask(index_BHNM, count_B.to(device).expand(1, heads, -1).contiguous())
