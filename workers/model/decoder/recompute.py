"""Blocks of a document whose keys and values are computed again because a question looks at them.

Sparse prefill loses answers where the facts stand: the tokens of a fact lacked something when they were read,
and a question that finds them reads keys and values that are a little off. Which of a document's facts are
asked for is not known before the question is; then it is a handful of blocks. So these are read once more,
with dense attention over what stands before them. Selective recomputation as in CacheBlend (Yao et al. 2024,
section 4), of what a dense reading rectifies in Rectified Sparse Attention (Sun et al. 2025, section 2.3);
chosen by the question's attention.

Shape suffixes: T tokens of the question, H query heads, G key/value heads, D head dimension, S keys, M blocks
of BLOCK keys, J = H / G, X = J x T, P rows computed again (B blocks of BLOCK).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ....kernels.constants import BLOCK
from ....kernels.executors.block_sparse import BlockSparseExecutor
from ....kernels.interface import AttentionInput, TileMask, no_phase
from ....kernels.layers.rope import KVRows
from .stack import AttentionCalls, LayerStack

QUESTION_ROWS = 64
"""Of a question so many rows are looked at, the last ones."""
KEYS_AT_ONCE = 1 << 17
"""Of a longer document so many keys are looked at after each other: it takes memory."""


class BlockAttention:
    """How much of its attention a question gives to each block of the `tokens` tokens before it: the most
    that any of its last rows gives, in any head of any layer, of what it gives to those tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._mass_M: torch.Tensor | None = None

    def add(self, q_THD: torch.Tensor, k_GSD: torch.Tensor) -> None:
        """One layer's queries (rotated), and keys, of which the first `tokens` count. Waits for nothing."""
        mass_M = attention_by_block(q_THD[-QUESTION_ROWS:], k_GSD[:, : self._tokens])
        self._mass_M = mass_M if self._mass_M is None else torch.maximum(self._mass_M, mass_M)

    def most(self, count: int) -> list[int]:
        """The `count` whole blocks with the most, ascending; fewer where there are not so many. Never the
        first one, of which every row saw all that there is. The last one only with all others: heads that
        look at what is near give it most of what they have, whatever is asked."""
        whole = self._tokens // BLOCK
        if self._mass_M is None or whole < 2:
            return []
        mass_M = self._mass_M[1:whole].clone()
        mass_M[-1] = -1.0
        best = mass_M.topk(min(count, whole - 1)).indices
        return sorted(1 + block for block in best.tolist())


def attention_by_block(q_THD: torch.Tensor, k_GSD: torch.Tensor) -> torch.Tensor:
    """mass_M (float32): the largest share of a row's attention in one head that lies on each block of keys,
    all of which every row sees."""
    groups, _, dim = k_GSD.shape
    q_TGJD = (q_THD * dim**-0.5).reshape(len(q_THD), groups, -1, dim)
    q_GXD = q_TGJD.transpose(0, 1).flatten(1, 2)
    masses_GM = []
    for q_XD, k_SD in zip(q_GXD.to(k_GSD.dtype), k_GSD, strict=True):
        parts = [_lse_by_block(q_XD, part_SD) for part_SD in k_SD.split(KEYS_AT_ONCE)]
        lse_XM = torch.cat(parts, dim=1)
        masses_GM.append((lse_XM - lse_XM.logsumexp(-1, keepdim=True)).amax(0))
    return torch.stack(masses_GM).amax(0).exp()


def _lse_by_block(q_XD: torch.Tensor, k_SD: torch.Tensor) -> torch.Tensor:
    logits_XS = F.pad((q_XD @ k_SD.T).float(), (0, -len(k_SD) % BLOCK), value=float("-inf"))
    return logits_XS.view(len(q_XD), -1, BLOCK).logsumexp(-1)


def rows_of_blocks(blocks: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """positions_P of the blocks' tokens, in the order of the blocks."""
    first_B1 = torch.tensor(blocks, device=device)[:, None] * BLOCK
    return (first_B1 + torch.arange(BLOCK, device=device)).flatten()


def recompute(
    stack: LayerStack,
    ids_P: torch.Tensor,
    blocks: Sequence[int],
    kv_rows: Callable[[int], KVRows],
    seen: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Compute the blocks' keys and values in every layer with dense attention over all that stands before.

    ids_P: the blocks' tokens. blocks: ascending, whole ones. kv_rows(layer): where their K and V go.
    seen(layer), asked after that: k_GSD and v_GSD of all tokens before the last block, the blocks' new ones
    among them, and behind these once more those of the blocks (S = (last block + B) x BLOCK).
    """
    config, device = stack.config, stack.device
    mask, dense = _tiles_before(blocks, config.q_heads, device), BlockSparseExecutor()
    start = blocks[-1] * BLOCK

    def attend(layer: int, q_PHD: torch.Tensor) -> torch.Tensor:
        k_GSD, v_GSD = seen(layer)
        q_BHTD = q_PHD.transpose(0, 1)[None].to(k_GSD.dtype)
        x = AttentionInput.of(q_BHTD, k_GSD[None], v_GSD[None], q_start=start)
        out_BHTD = dense.attend(x, mask, None, no_phase)
        return out_BHTD[0].transpose(0, 1).to(q_PHD.dtype)

    stack.run(stack.embed(ids_P), rows_of_blocks(blocks, device), AttentionCalls(kv_rows, attend))


def _tiles_before(blocks: Sequence[int], heads: int, device: torch.device) -> TileMask:
    """For the n-th of the blocks, whose keys are the n-th behind the last block's start: all blocks before it
    where they stand, and its own there."""
    behind = blocks[-1]
    index_BM = torch.arange(behind + len(blocks), dtype=torch.int16).repeat(len(blocks), 1)
    for n, block in enumerate(blocks):
        index_BM[n, block] = behind + n
    count_B = torch.tensor(blocks, dtype=torch.int32) + 1
    index_BHNM = index_BM.to(device).expand(1, heads, -1, -1).contiguous()
    return TileMask(index_BHNM, count_B.to(device).expand(1, heads, -1).contiguous())
