"""DeltaXAttention computes the tiles with the best scores exactly and a mask's other tiles over packed keys
(DeltaAttention, section 4.2).

Shape suffixes: J keys attended to.
"""

import math

import torch

from deltafront.kernels.attention.block_sparse import keys_of
from deltafront.kernels.attention.inputs import attend_keys, check_mask
from deltafront.kernels.attention.packed.delta_kv import cpu_pack_head
from deltafront.kernels.attention.packed.delta_xattention_kernel import kernel_attend, kernel_exact_table
from deltafront.kernels.attention.packed.runs import PackedRuns
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import (
    AttentionInput,
    KernelInputError,
    Phase,
    StateSpec,
    TileMask,
    runs_on_cpu,
)
from deltafront.kernels.options import DeltaXAttentionOptions
from deltafront.kernels.selectors.rules.rule import ROUNDING


class DeltaXAttentionBackend:
    """Computes the share `exact_share` of a mask's tiles over exact keys, and the mask's other tiles over
    packed keys. The mask must have scores."""

    def __init__(self, options: DeltaXAttentionOptions) -> None:
        self.cos = options.cos
        self.exact_share = options.exact_share
        self._means = options.means

    def new_state(self, spec: StateSpec) -> PackedRuns:
        return PackedRuns.empty(spec, BLOCK)

    def attend(
        self, x: AttentionInput, mask: TileMask | None, state: PackedRuns, phase: Phase
    ) -> torch.Tensor:
        kept = self._check(x, mask)
        state.check(x, "delta_xattention")
        with phase("anchors"):
            state.extend(x.k_BGSD, BLOCK, self.cos)
        with phase("attention"):
            attend = cpu_attend if runs_on_cpu(x.q_BHTD, "delta_xattention") else kernel_attend
            return attend(x, kept, state, self._exact(x, kept), means=self._means)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: PackedRuns) -> torch.Tensor:
        return self.tiles_of_heads(x, mask, state).sum()

    def tiles_of_heads(self, x: AttentionInput, mask: TileMask | None, state: PackedRuns) -> torch.Tensor:
        """Count the q · k dot products of `attend` for each query head, in tiles: float64 (B, H)."""
        kept = self._check(x, mask)
        exact_BHNM = self._exact(x, kept)
        entry_M = torch.arange(kept.index_BHNM.shape[-1], device=exact_BHNM.device)
        listed_BHNM = entry_M < kept.count_BHN[..., None]
        batch, heads = x.q_BHTD.shape[:2]
        runs_BGM = torch.diff(state.offset_BGC, dim=-1, append=state.offset_BGC[..., -1:])
        runs_BHM = runs_BGM.repeat_interleave(x.group, dim=1).double() / BLOCK
        lesser_BHNM = listed_BHNM & ~exact_BHNM
        tile_BHX = torch.where(lesser_BHNM, kept.index_BHNM, 0).long().view(batch, heads, -1)
        packed_BHX = runs_BHM.gather(2, tile_BHX) * lesser_BHNM.view(batch, heads, -1)
        return packed_BHX.sum(2) + (listed_BHNM & exact_BHNM).sum((2, 3), dtype=torch.float64)

    def _exact(self, x: AttentionInput, kept: TileMask) -> torch.Tensor:
        """Mark the exact tiles: bool, in the layout of the mask's index."""
        table = cpu_exact_table if runs_on_cpu(x.q_BHTD, "delta_xattention") else kernel_exact_table
        return table(kept, self.exact_share)

    def _check(self, x: AttentionInput, mask: TileMask | None) -> TileMask:
        kept = check_mask(x, mask, "delta_xattention")
        score = kept.score_BHNM
        if score is None or score.shape != kept.index_BHNM.shape or score.dtype != torch.float32:
            raise KernelInputError(
                "delta_xattention needs a float32 score for every listed tile, to take the best "
                "exact_share of them exactly: use a selector made with_scores"
            )
        return kept


def cpu_exact_table(mask: TileMask, exact_share: float) -> torch.Tensor:
    """Mark each list's exact tiles: the diagonal (last) and the best ceil(exact_share * n) of the n others,
    with ties.

    Returns:
        bool, in the layout of the mask's index; entries past a list's count are undefined.
    """
    assert mask.score_BHNM is not None
    exact_BHNM = torch.zeros(mask.index_BHNM.shape, dtype=torch.bool)
    lists = zip(
        exact_BHNM.flatten(0, 2), mask.score_BHNM.flatten(0, 2), mask.count_BHN.flatten(), strict=True
    )
    for exact_M, score_M, count in lists:
        others = int(count) - 1
        exact_M[others] = True
        wanted = math.ceil(exact_share * others * ROUNDING)
        if wanted > 0:
            exact_M[:others] = score_M[:others] >= score_M[:others].topk(wanted).values[-1]
    return exact_BHNM


def cpu_attend(
    x: AttentionInput, mask: TileMask, state: PackedRuns, exact_BHNM: torch.Tensor, *, means: bool
) -> torch.Tensor:
    """Compute attention over the mask's tiles: marked tiles exactly, the others over packed runs.

    Args:
        exact_BHNM: bool, in the layout of the mask's index. The diagonal is marked.
    """
    out_BHTD = torch.empty(x.q_BHTD.shape, dtype=x.q_BHTD.dtype)
    counts = mask.count_BHN.tolist()
    for b in range(x.q_BHTD.shape[0]):
        for h in range(x.q_BHTD.shape[1]):
            g = h // x.group
            if h % x.group == 0:
                offset_M = state.offset_BGC[b, g, : state.chunks + 1].long()
                start_P, end = state.start_BGP[b, g, : int(offset_M[-1])], state.chunks * BLOCK
                packed = cpu_pack_head(x.k_BGSD[b, g], x.v_BGSD[b, g], start_P, end, means=means)
            for n in range(x.query_blocks):
                count = counts[b][h][n]
                tile_M = mask.index_BHNM[b, h, n, :count].long()
                exact_M = exact_BHNM[b, h, n, :count]
                rows = slice(n * BLOCK, min((n + 1) * BLOCK, x.q_BHTD.shape[2]))
                lesser = _runs_of(tile_M[~exact_M], offset_M)
                out = _attend_block(x, b, h, rows, tile_M[exact_M], [part[lesser] for part in packed])
                out_BHTD[b, h, rows] = out.to(out_BHTD.dtype)
    return out_BHTD


def _runs_of(tile_M: torch.Tensor, offset_M: torch.Tensor) -> torch.Tensor:
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
    k_JD, v_JD = (kv[b, h // x.group].index_select(0, key_J).float() for kv in (x.k_BGSD, x.v_BGSD))
    k_JD, v_JD = torch.cat([keys_PD, k_JD]), torch.cat([values_PD, v_JD])
    mask_TJ = torch.cat([weight_TP, bias_TJ], dim=1)
    heads = slice(h, h + 1)
    return attend_keys(x, heads, x.q_BHTD[b, heads, rows], k_JD, v_JD, mask_TJ)[0]
