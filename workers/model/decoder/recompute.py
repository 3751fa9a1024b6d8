"""Recomputes the KV of some blocks of a sparsely prefilled document densely: those that a question attends
to.

Sources: selective recomputation (CacheBlend, Yao et al. 2024, section 4), and replacing KV by that of dense
prefill (Rectified Sparse Attention, Sun et al. 2025, section 2.3).

Shape suffixes also: M blocks of BLOCK keys, P rows of B recomputed blocks.
"""

from collections.abc import Callable, Sequence

import torch

from deltafront.kernels.attention.block_sparse import BlockSparseBackend
from deltafront.kernels.attention.dense import DenseBackend
from deltafront.kernels.attention.inputs import window_begin
from deltafront.kernels.block_mass import attention_by_block
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, TileMask, no_phase
from deltafront.kernels.layers.rope import KVRows
from deltafront.workers.model.decoder.collectives import SINGLE_RANK, Collectives
from deltafront.workers.model.decoder.stack import AttentionCalls, LayerStack

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


def recompute(
    stack: LayerStack,
    ids_P: torch.Tensor,
    blocks: Sequence[int],
    kv_rows: Callable[[int], KVRows],
    context: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Compute the blocks' K and V in all layers, with dense attention to all earlier tokens.

    Args:
        ids_P: The blocks' token ids.
        blocks: Complete blocks, ascending.
        kv_rows: Returns where to write a layer's new K and V.
        context: Returns k_GSD and v_GSD of all tokens before the last block, followed by the blocks' new K
            and V, which are then already written.
    """
    config, device = stack.config, stack.device
    mask, dense = _tiles_before(blocks, config.q_heads, device), BlockSparseBackend()
    start = blocks[-1] * BLOCK

    def attend(layer: int, q_PHD: torch.Tensor) -> torch.Tensor:
        k_GSD, v_GSD = context(layer)
        if layer in config.window_layers:
            return _attend_to_windows(q_PHD, k_GSD, v_GSD, blocks, config.windows[layer], stack.sinks(layer))
        q_BHTD = q_PHD.transpose(0, 1)[None].to(k_GSD.dtype)
        x = AttentionInput.of(q_BHTD, k_GSD[None], v_GSD[None], q_start=start, sink_H=stack.sinks(layer))
        out_BHTD = dense.attend(x, mask, None, no_phase)
        return out_BHTD[0].transpose(0, 1).to(q_PHD.dtype)

    stack.run(stack.embed(ids_P), rows_of_blocks(blocks, device), AttentionCalls(kv_rows, attend))


def _attend_to_windows(
    q_PHD: torch.Tensor,
    k_GSD: torch.Tensor,
    v_GSD: torch.Tensor,
    blocks: Sequence[int],
    window: int,
    sink_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attend block by block. Each block attends to the keys in its window before it, and to its own new keys.
    In k_GSD and v_GSD, the n-th block's new rows begin n blocks after the start of the last block."""
    parts, backend, last = [], DenseBackend(window=window), blocks[-1]
    for n, (block, q_THD) in enumerate(zip(blocks, torch.split(q_PHD, BLOCK), strict=True)):
        before, own = (
            slice(first * BLOCK, end * BLOCK)
            for first, end in ((window_begin(block, window), block), (last + n, last + n + 1))
        )
        k_BGSD, v_BGSD = (torch.cat([x[:, before], x[:, own]], dim=1)[None] for x in (k_GSD, v_GSD))
        q_BHTD = q_THD.transpose(0, 1)[None].to(k_GSD.dtype)
        x = AttentionInput.of(q_BHTD, k_BGSD, v_BGSD, sink_H=sink_H)
        parts.append(backend.attend(x, None, None, no_phase)[0].transpose(0, 1).to(q_PHD.dtype))
    return torch.cat(parts)


def _tiles_before(blocks: Sequence[int], heads: int, device: torch.device) -> TileMask:
    """Return the mask with which the n-th block attends to all blocks before it and to its own new keys. The
    new keys begin n blocks after the start of the last block."""
    last = blocks[-1]
    index_BM = torch.arange(last + len(blocks), dtype=torch.int16).repeat(len(blocks), 1)
    for n, block in enumerate(blocks):
        index_BM[n, block] = last + n
    count_B = torch.tensor(blocks, dtype=torch.int32) + 1
    index_BHNM = index_BM.to(device).expand(1, heads, -1, -1).contiguous()
    return TileMask(index_BHNM, count_B.to(device).expand(1, heads, -1).contiguous())
