"""DeltaXAttention in fp32, on the CPU. Shape suffixes as in `packing.py`; J keys attended to."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from ...interface import BLOCK, AttentionInput, TileMask
from ..block_sparse.reference import keys_of
from ..packed_kv.packing import PackedRuns
from ..packed_kv.reference import pack_head


def exact_entries(score_M: torch.Tensor, share: float) -> torch.Tensor:
    """bool (entries): which of one row's listed tiles are attended exactly.

    The diagonal (the last entry) and, of the others, those that score at least as high as the
    ceil(share * others)-th highest.
    """
    exact_M = torch.zeros(score_M.shape, dtype=torch.bool)
    exact_M[-1] = True
    others = score_M.numel() - 1
    wanted = math.ceil(share * others)
    if wanted > 0:
        exact_M[:-1] = score_M[:-1] >= score_M[:-1].topk(wanted).values[-1]
    return exact_M


def attend(
    x: AttentionInput, mask: TileMask, state: PackedRuns, *, share: float, mean_keys: bool = True
) -> torch.Tensor:
    """Kept tiles: `share` of them and the diagonal exact, the rest over their runs, weighted by length."""
    assert mask.score_BHNM is not None
    out_BHTD = torch.empty(x.q_BHTD.shape, dtype=x.q_BHTD.dtype)
    counts = mask.count_BHN.tolist()
    for b in range(x.q_BHTD.shape[0]):
        for h in range(x.q_BHTD.shape[1]):
            g = h // x.group
            if h % x.group == 0:
                offset_M = state.offset_BGC[b, g, : state.chunks + 1].long()
                packed = _packed(x, state, b, g, int(offset_M[-1]), mean_keys)
            for n in range(x.query_blocks):
                count = counts[b][h][n]
                tile_M = mask.index_BHNM[b, h, n, :count].long()
                exact_M = exact_entries(mask.score_BHNM[b, h, n, :count], share)
                rows = slice(n * BLOCK, min((n + 1) * BLOCK, x.q_BHTD.shape[2]))
                lesser = _runs_of(tile_M[~exact_M], offset_M)
                out = _attend_block(x, b, h, rows, tile_M[exact_M], [part[lesser] for part in packed])
                out_BHTD[b, h, rows] = out.to(out_BHTD.dtype)
    return out_BHTD


def _packed(
    x: AttentionInput, state: PackedRuns, b: int, g: int, runs: int, mean_keys: bool
) -> tuple[torch.Tensor, ...]:
    if runs == 0:
        nothing = torch.zeros(0, x.q_BHTD.shape[3])
        return nothing, nothing, torch.zeros(0)
    end = state.chunks * BLOCK
    return pack_head(x.k_BGSD[b, g], x.v_BGSD[b, g], state.start_BGP[b, g, :runs], end, mean_keys)


def _runs_of(tile_M: torch.Tensor, offset_M: torch.Tensor) -> torch.Tensor:
    """Packed rows of the given tiles."""
    spans = [torch.arange(int(offset_M[m]), int(offset_M[m + 1])) for m in tile_M.tolist()]
    return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.long)


def _attend_block(
    x: AttentionInput, b: int, h: int, rows: slice, exact_M: torch.Tensor, packed: list[torch.Tensor]
) -> torch.Tensor:
    keys_PD, values_PD, length_P = packed
    key_J = keys_of(exact_M, x.q_start + rows.stop)
    position_T1 = torch.arange(x.q_start + rows.start, x.q_start + rows.stop)[:, None]
    bias_TJ = torch.zeros(position_T1.numel(), key_J.numel())
    bias_TJ.masked_fill_(key_J > position_T1, float("-inf"))
    weight_TP = length_P.log().expand(position_T1.numel(), -1)
    g = h // x.group
    return scaled_dot_product_attention(
        x.q_BHTD[b : b + 1, h : h + 1, rows].float(),
        torch.cat([keys_PD, x.k_BGSD[b, g].index_select(0, key_J).float()])[None, None],
        torch.cat([values_PD, x.v_BGSD[b, g].index_select(0, key_J).float()])[None, None],
        attn_mask=torch.cat([weight_TP, bias_TJ], dim=1),
        scale=x.scale,
    )[0, 0]
