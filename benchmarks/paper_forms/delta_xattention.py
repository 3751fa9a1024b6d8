"""Controls of DeltaXAttention: XAttention with every tile packed, and XAttention with fewer tiles at the same
cost.

Shape suffixes are defined in `kernels.interface`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from deltafront.benchmarks.paper_forms.methods import AllPackedOptions, TileSkipOptions
from deltafront.kernels.anchor_scan import find_anchors
from deltafront.kernels.attention.block_sparse import BlockSparseBackend
from deltafront.kernels.attention.inputs import check_mask
from deltafront.kernels.attention.packed.delta_xattention import DeltaXAttentionBackend
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, Phase, StateSpec, TileMask
from deltafront.kernels.options import RunOptions
from deltafront.kernels.selectors.grouped.antidiagonal import scoring_selector
from deltafront.kernels.selectors.rules.cpu import compact


class AllPacked:
    """Computes XAttention's tiles with each key and value replaced by the first (anchor) or the mean of its
    run of similar keys. The result equals packed attention with runs that end at the query."""

    def __init__(self, options: AllPackedOptions) -> None:
        self._options = options
        self._inner = BlockSparseBackend()

    def new_state(self, spec: StateSpec) -> None:
        return None

    def attend(self, x: AttentionInput, mask: TileMask | None, state: None, phase: Phase) -> torch.Tensor:
        with phase("anchors"):
            k_BGSD, v_BGSD = self._repeated(x)
        return self._inner.attend(replace(x, k_BGSD=k_BGSD, v_BGSD=v_BGSD), mask, state, phase)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: None) -> torch.Tensor:
        kept_BHNM = listed(x, check_mask(x, mask, "all packed"))
        is_anchor_BGS = anchors_of(x, self._options)
        padded = torch.nn.functional.pad(is_anchor_BGS, (0, -is_anchor_BGS.shape[2] % BLOCK))
        runs_BGM = padded.view(*padded.shape[:2], -1, BLOCK).sum(-1).double()
        runs_BH1M = runs_BGM.repeat_interleave(x.group, dim=1)[:, :, None]
        return (kept_BHNM * runs_BH1M).sum() / BLOCK

    def _repeated(self, x: AttentionInput) -> tuple[torch.Tensor, torch.Tensor]:
        is_anchor_BGS = anchors_of(x, self._options)
        run_BGS1 = (is_anchor_BGS.cumsum(-1) - 1)[..., None]
        if not self._options.means:
            place_S = torch.arange(is_anchor_BGS.shape[2], device=is_anchor_BGS.device)
            leader_BGS1 = torch.where(is_anchor_BGS, place_S, 0).cummax(-1).values[..., None]
            return tuple(kv.gather(2, leader_BGS1.expand_as(kv)) for kv in (x.k_BGSD, x.v_BGSD))  # type: ignore[return-value]
        length_BGS1 = torch.zeros(run_BGS1.shape, device=run_BGS1.device)
        length_BGS1.scatter_add_(2, run_BGS1, torch.ones_like(length_BGS1))
        return tuple(_means(kv, run_BGS1, length_BGS1) for kv in (x.k_BGSD, x.v_BGSD))  # type: ignore[return-value]


def _means(kv_BGSD: torch.Tensor, run_BGS1: torch.Tensor, length_BGS1: torch.Tensor) -> torch.Tensor:
    place_BGSD = run_BGS1.expand_as(kv_BGSD)
    sums_BGSD = torch.zeros(kv_BGSD.shape, device=kv_BGSD.device).scatter_add_(2, place_BGSD, kv_BGSD.float())
    return (sums_BGSD / length_BGS1.clamp(min=1)).to(kv_BGSD.dtype).gather(2, place_BGSD)


def anchors_of(x: AttentionInput, options: RunOptions) -> torch.Tensor:
    """Return is_anchor_BGS for runs that do not cross tiles."""
    return find_anchors(x.k_BGSD, options.cos, BLOCK)


def listed(x: AttentionInput, mask: TileMask) -> torch.Tensor:
    """Convert the mask to bool_BHNM."""
    kept_BHNX = (
        torch.arange(mask.index_BHNM.shape[3], device=mask.count_BHN.device) < mask.count_BHN[..., None]
    )
    place_BHNX = torch.where(kept_BHNX, mask.index_BHNM.long(), x.key_blocks)
    table = torch.zeros(*kept_BHNX.shape[:3], x.key_blocks + 1, dtype=torch.bool, device=kept_BHNX.device)
    return table.scatter_(3, place_BHNX, True)[..., :-1]


class TileSkipSelector:
    """Drops XAttention's tiles with the lowest scores.

    A head drops the share `skip` of its tiles, or the number of tiles that DeltaXAttention saves, from each
    query block in proportion to its tiles. Diagonal and sink tiles stay. Each chunk is treated separately.
    """

    def __init__(self, options: TileSkipOptions) -> None:
        self._scoring = scoring_selector(options)
        self._packing = DeltaXAttentionBackend(options)
        self._skip = options.skip
        self.scored_share = self._scoring.scored_share

    def new_state(self, spec: StateSpec) -> Any:
        return self._scoring.new_state(spec), self._packing.new_state(spec)

    def select(self, x: AttentionInput, state: Any, phase: Phase) -> TileMask:
        scoring, packing = state
        mask = self._scoring.select(x, scoring, phase)
        assert mask.score_BHNM is not None
        with phase("selection"):
            saved_BH = self._saved(x, mask, packing)
            return skipped(x, mask, saved_BH)

    def _saved(self, x: AttentionInput, mask: TileMask, packing: Any) -> torch.Tensor:
        """Return the number of tiles that each head drops, float64."""
        total_BH = mask.count_BHN.sum(2, dtype=torch.float64)
        if self._skip > 0:
            return total_BH * self._skip
        packing.extend(x.k_BGSD, BLOCK, self._packing.cos)
        return total_BH - self._packing.tiles_of_heads(x, mask, packing)


def skipped(x: AttentionInput, mask: TileMask, saved_BH: torch.Tensor) -> TileMask:
    """Drop `saved_BH` tiles (rounded down) of each head, spread over query blocks in proportion to their
    tiles. A query block loses the tiles with the lowest scores, never block 0 or the diagonal."""
    assert mask.score_BHNM is not None
    other_BHN = (mask.count_BHN.double() - 2).clamp(min=0)
    share_BH = (saved_BH / other_BHN.sum(2).clamp(min=1)).clamp(max=1.0)
    upto_BHN = (other_BHN.cumsum(2) * share_BH[..., None] + 1e-9).floor()
    fewer_BHN = torch.diff(upto_BHN, dim=2, prepend=torch.zeros_like(upto_BHN[..., :1]))
    kept_BHNM = listed(x, mask)
    entry_X = torch.arange(mask.index_BHNM.shape[3], device=kept_BHNM.device)
    other_BHNX = (entry_X > 0) & (entry_X < mask.count_BHN[..., None] - 1)
    score_BHNX = mask.score_BHNM.masked_fill(~other_BHNX, float("inf"))
    order_BHNX = score_BHNX.argsort(dim=-1, stable=True)
    dropped_BHNX = torch.zeros_like(other_BHNX).scatter_(3, order_BHNX, entry_X < fewer_BHN[..., None])
    place_BHNX = torch.where(dropped_BHNX, mask.index_BHNM.long(), x.key_blocks)
    gone = torch.zeros(*kept_BHNM.shape[:3], x.key_blocks + 1, dtype=torch.bool, device=kept_BHNM.device)
    return compact(kept_BHNM & ~gone.scatter_(3, place_BHNX, True)[..., :-1])
