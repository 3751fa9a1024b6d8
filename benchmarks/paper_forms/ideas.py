"""Three ideas of the papers' last pages, in torch and without a loop over rows or tiles (experiment 0002).

Shape suffixes as in `kernels.interface`; X kept tiles of a row, J keys of a row, R dense rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import normalize, pad, scaled_dot_product_attention

from ...kernels.anchor_scan import find_anchors
from ...kernels.constants import BLOCK
from ...kernels.executors.block_sparse import BlockSparseExecutor
from ...kernels.executors.inputs import check_mask, new_output
from ...kernels.executors.packed.delta_kv import CHUNK
from ...kernels.interface import AttentionInput, Phase, StateSpec, TileMask
from ...kernels.selectors.grouped.antidiagonal import AntidiagonalSelector
from ...kernels.selectors.rules import cpu, kernel
from .methods import ChangedRowsOptions, SharedMasksOptions

SLAB, ROWS = 8, 512
"""Query blocks whose kept tiles, and dense rows whose logits' mask, are in memory at once."""
HALVINGS = 12


@dataclass
class LayerState:
    layer: int
    inner: Any


class SharedMasksSelector:
    """XAttention's tiles, scored in every `every`-th layer and used in the layers up to the next. One
    instance serves all layers of a document, which come in order, so the last mask is the one to use."""

    def __init__(self, options: SharedMasksOptions) -> None:
        self._inner = AntidiagonalSelector(options)
        self._every, self._together = options.every, options.together
        self._last: TileMask | None = None
        self.sampled = self._inner.sampled / self._every

    def new_state(self, spec: StateSpec) -> LayerState:
        return LayerState(spec.layer, self._inner.new_state(spec))

    def select(self, x: AttentionInput, state: LayerState, phase: Phase) -> TileMask:
        if state.layer % self._every == 0 or self._last is None:
            self._last = self._scored(x, state.inner, phase)
        return check_mask(x, self._last, "shared masks")

    def _scored(self, x: AttentionInput, state: Any, phase: Phase) -> TileMask:
        if not self._together:
            return self._inner.select(x, state, phase)
        score_BHNM = self._inner.scores(x, state, phase)
        with phase("selection"):
            summed_B1NM = score_BHNM.sum(1, keepdim=True)
            select = kernel.select if x.q_BHTD.is_cuda else cpu.select
            mask = select(summed_B1NM, state.rule, x.first_block)
            heads = x.q_BHTD.shape[1]
            return TileMask(
                mask.index_BHNM.expand(-1, heads, -1, -1), mask.count_BHN.expand(-1, heads, -1).contiguous()
            )


class MeanTilesExecutor:
    """Kept tiles are exact. Each other tile before the diagonal is one key in the same softmax: its mean key,
    with the weight of its 128 keys and its mean value (FlashPrefill V2's zero-order form)."""

    def __init__(self, options: object) -> None:
        """It takes none."""

    def new_state(self, spec: StateSpec) -> None:
        return None

    def attend(self, x: AttentionInput, mask: TileMask | None, state: None, phase: Phase) -> torch.Tensor:
        kept = check_mask(x, mask, "mean tiles")
        with phase("attention"):
            out_BHTD = new_output(x)
            for b in range(out_BHTD.shape[0]):
                for first in range(0, x.query_blocks, SLAB):
                    rows = slice(first * BLOCK, (first + SLAB) * BLOCK)
                    out_BHTD[b, :, rows] = _with_means(x, kept, b, first)
            return out_BHTD

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: None) -> torch.Tensor:
        """A dropped tile costs one key of its 128."""
        count_BHN = check_mask(x, mask, "mean tiles").count_BHN.double()
        causal_N = torch.arange(x.query_blocks, device=count_BHN.device) + x.first_block + 1
        return (count_BHN + (causal_N - count_BHN) / BLOCK).sum()


def _with_means(x: AttentionInput, mask: TileMask, b: int, first: int) -> torch.Tensor:
    """out_HTD of the query blocks first .. first + SLAB - 1 of one prompt."""
    index_HNX, count_HN = (t[b, :, first : first + SLAB] for t in (mask.index_BHNM, mask.count_BHN))
    heads, blocks = count_HN.shape
    most = int(count_HN.max())
    device = x.q_BHTD.device
    kept_HNX = torch.arange(most, device=device) < count_HN[..., None]
    tile_HNX = torch.where(kept_HNX, index_HNX[..., :most].long(), 0)
    own_N = torch.arange(blocks, device=device) + x.first_block + first
    before = int(own_N[-1])  # tiles 0 .. before-1 are whole
    stands_HNM = torch.arange(before, device=device).expand(heads, blocks, -1) < own_N[:, None]
    place_HNX = torch.where(kept_HNX & (tile_HNX < before), tile_HNX, before)
    stands_HNM = pad(stands_HNM, (0, 1)).scatter(2, place_HNX, False)[..., :before]

    key_HNJ = (tile_HNX[..., None] * BLOCK + torch.arange(BLOCK, device=device)).flatten(2)
    position_NT = own_N[:, None] * BLOCK + torch.arange(BLOCK, device=device)
    seen_HNTJ = key_HNJ[:, :, None] <= position_NT[..., None]
    seen_HNTJ &= kept_HNX.repeat_interleave(BLOCK, 2)[:, :, None]
    exact_HNTJ = torch.zeros(seen_HNTJ.shape, dtype=x.q_BHTD.dtype, device=device)
    exact_HNTJ.masked_fill_(~seen_HNTJ, -torch.inf)
    means_HNM = torch.full(stands_HNM.shape, math.log(BLOCK), dtype=x.q_BHTD.dtype, device=device)
    means_HNM.masked_fill_(~stands_HNM, -torch.inf)
    bias_HNTJ = torch.cat([exact_HNTJ, means_HNM[:, :, None].expand(-1, -1, BLOCK, -1)], dim=3)

    head_H11 = torch.arange(heads, device=device)[:, None, None] // x.group
    k_HNJD, v_HNJD = (_keys(kv[b], head_H11, key_HNJ, before) for kv in (x.k_BGSD, x.v_BGSD))
    q_HTD = x.q_BHTD[b, :, first * BLOCK : (first + blocks) * BLOCK]
    rows = q_HTD.shape[1]
    q_HNTD = pad(q_HTD, (0, 0, 0, blocks * BLOCK - rows)).reshape(heads, blocks, BLOCK, -1)
    out_HNTD = scaled_dot_product_attention(q_HNTD, k_HNJD, v_HNJD, attn_mask=bias_HNTJ, scale=x.scale)
    return out_HNTD.flatten(1, 2)[:, :rows]


def _keys(kv_GSD: torch.Tensor, head_H11: torch.Tensor, key_HNJ: torch.Tensor, before: int) -> torch.Tensor:
    """Rows of the given keys (0 behind the last one), then the means of the first `before` tiles."""
    inside_HNJ1 = (key_HNJ < kv_GSD.shape[1])[..., None]
    rows_HNJD = kv_GSD[head_H11, key_HNJ.clamp(max=kv_GSD.shape[1] - 1)] * inside_HNJ1
    groups, _, dim = kv_GSD.shape
    tile_GMSD = kv_GSD[:, : before * BLOCK].reshape(groups, before, BLOCK, dim)
    mean_GMD = tile_GMSD.float().mean(2).to(kv_GSD.dtype)
    mean_HNMD = mean_GMD[head_H11[:, 0, 0], None].expand(-1, key_HNJ.shape[1], -1, -1)
    return torch.cat([rows_HNJD, mean_HNMD], dim=2)


@dataclass
class ChangedRowsState:
    """is_dense_BHT: rows of the last call that were read densely."""

    is_dense_BHT: torch.Tensor | None = None


class ChangedRowsExecutor:
    """The Δ correction from rows whose query has turned away from the last dense row's, as anchors do
    (runs end after 512 rows), instead of every γ-th: about one in `gamma` of a layer's rows, by one cosine
    for its heads. As with Δ, the prompt's last whole block and what follows it are dense."""

    def __init__(self, options: ChangedRowsOptions) -> None:
        self._gamma = options.gamma
        self._inner = BlockSparseExecutor()

    def new_state(self, spec: StateSpec) -> ChangedRowsState:
        return ChangedRowsState()

    def attend(
        self, x: AttentionInput, mask: TileMask | None, state: ChangedRowsState, phase: Phase
    ) -> torch.Tensor:
        out_BHTD = self._inner.attend(x, mask, None, phase)
        with phase("anchors"):
            is_dense_BHT = changed(x.q_BHTD, self._gamma)
            tail = max(0, x.prompt_tokens // BLOCK - 1) * BLOCK - x.q_start
            is_dense_BHT[:, :, max(0, tail) :] = True
        with phase("correction"):
            for b in range(out_BHTD.shape[0]):
                _correct(x, b, is_dense_BHT[b], out_BHTD[b])
        state.is_dense_BHT = is_dense_BHT
        return out_BHTD

    def computed_tiles(
        self, x: AttentionInput, mask: TileMask | None, state: ChangedRowsState
    ) -> torch.Tensor:
        """A dense row counts 1/128 of its row of tiles."""
        assert state.is_dense_BHT is not None, "tiles are counted after attending"
        row_T = torch.arange(x.q_BHTD.shape[2], device=x.q_BHTD.device)
        tiles_T = ((x.q_start + row_T) // BLOCK + 1).double() / BLOCK
        return self._inner.computed_tiles(x, mask, None) + (state.is_dense_BHT * tiles_T).sum()


def changed(q_BHTD: torch.Tensor, gamma: int) -> torch.Tensor:
    """is_dense_BHT: anchors at the cosine that makes one row in `gamma` one, or as near as halving gets."""
    wanted = q_BHTD[..., 0].numel() / gamma
    unit_BHTD = normalize(q_BHTD.float(), dim=-1).to(q_BHTD.dtype)
    low, high = -1.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        fewer = int(find_anchors(unit_BHTD, middle, CHUNK).sum()) <= wanted
        low, high = (middle, high) if fewer else (low, middle)
    return find_anchors(unit_BHTD, low, CHUNK).clone()


def _correct(x: AttentionInput, b: int, is_dense_HT: torch.Tensor, out_HTD: torch.Tensor) -> None:
    """Add each dense row's difference to it and the rows up to the next; the first row is dense."""
    count_H = is_dense_HT.sum(1)
    most = int(count_H.max())
    # Dense rows first, in order; heads with fewer have others behind, which nothing reads.
    row_HR = is_dense_HT.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    place_HRD = row_HR[..., None].expand(-1, -1, out_HTD.shape[2])
    dense_HRD = torch.cat(
        [_dense_rows(x, b, row_HR[:, first : first + ROWS]) for first in range(0, most, ROWS)], dim=1
    )
    difference_HRD = dense_HRD.float() - out_HTD.gather(1, place_HRD).float()
    owner_HTD = (is_dense_HT.cumsum(1) - 1)[..., None].expand_as(out_HTD)
    out_HTD += difference_HRD.gather(1, owner_HTD).to(out_HTD.dtype)


def _dense_rows(x: AttentionInput, b: int, row_HR: torch.Tensor) -> torch.Tensor:
    """out_HRD of dense attention."""
    q_HRD = x.q_BHTD[b].gather(1, row_HR[..., None].expand(-1, -1, x.q_BHTD.shape[3]))
    stop = x.q_start + int(row_HR.max()) + 1
    seen_HRS = torch.arange(stop, device=row_HR.device) <= (row_HR + x.q_start)[..., None]
    k_HSD, v_HSD = (kv[b, :, :stop].repeat_interleave(x.group, 0) for kv in (x.k_BGSD, x.v_BGSD))
    return scaled_dot_product_attention(
        q_HRD[None], k_HSD[None], v_HSD[None], attn_mask=seen_HRS[None], scale=x.scale
    )[0]
