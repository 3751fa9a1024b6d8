"""Three ideas of the papers' last pages (experiment 0002). Shape suffixes as in `kernels.interface`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import normalize

from deltafront.benchmarks.paper_forms.delta_xattention import listed
from deltafront.benchmarks.paper_forms.methods import ChangedRowsOptions, SharedMasksOptions
from deltafront.kernels.anchor_scan import find_anchors
from deltafront.kernels.attention.block_sparse import BlockSparseBackend
from deltafront.kernels.attention.dense import DenseBackend
from deltafront.kernels.attention.inputs import check_mask
from deltafront.kernels.attention.packed.delta_kv import CHUNK
from deltafront.kernels.attention.packed.delta_xattention import cpu_attend
from deltafront.kernels.attention.packed.delta_xattention_kernel import kernel_attend
from deltafront.kernels.attention.packed.runs import PackedRuns
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, Phase, StateSpec, TileMask, no_phase, runs_on_cpu
from deltafront.kernels.selectors.grouped.antidiagonal import AntidiagonalSelector
from deltafront.kernels.selectors.rules import cpu, kernel

HALVINGS = 12
ANY_COSINE = -2.0
"""A cosine that any two keys reach, so that all keys of a chunk are one run."""


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
        self.scored_share = self._inner.scored_share / self._every

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


class MeanTilesBackend:
    """Kept tiles are exact. Each other tile before the diagonal is one key in the same softmax: its mean key,
    with the weight of its 128 keys and its mean value (FlashPrefill V2's zero-order form). That is what
    DeltaXAttention packs where all keys of a tile are one run."""

    def __init__(self, options: object) -> None:
        """It takes none."""

    def new_state(self, spec: StateSpec) -> PackedRuns:
        return PackedRuns.empty(spec, BLOCK)

    def attend(
        self, x: AttentionInput, mask: TileMask | None, state: PackedRuns, phase: Phase
    ) -> torch.Tensor:
        kept_BHNM = listed(x, check_mask(x, mask, "mean tiles"))
        with phase("anchors"):
            state.extend(x.k_BGSD, BLOCK, ANY_COSINE)
        with phase("attention"):
            attend = cpu_attend if runs_on_cpu(x.q_BHTD, "mean tiles") else kernel_attend
            return attend(x, causal_list(kept_BHNM, x.first_block), state, kept_BHNM, means=True)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: PackedRuns) -> torch.Tensor:
        """A dropped tile costs one key of its 128."""
        count_BHN = check_mask(x, mask, "mean tiles").count_BHN.double()
        causal_N = torch.arange(x.query_blocks, device=count_BHN.device) + x.first_block + 1
        return (count_BHN + (causal_N - count_BHN) / BLOCK).sum()


def causal_list(kept_BHNM: torch.Tensor, first_block: int) -> TileMask:
    """All tiles up to the diagonal, in a list as long as a row of the table."""
    rows, columns = kept_BHNM.shape[2:]
    tile_M = torch.arange(columns, dtype=torch.int16, device=kept_BHNM.device)
    causal_N = torch.arange(rows, dtype=torch.int32, device=tile_M.device) + first_block + 1
    return TileMask(tile_M.expand(kept_BHNM.shape), causal_N.expand(kept_BHNM.shape[:3]))


@dataclass
class ChangedRowsState:
    """is_dense_BHT: rows of the last call that were read densely."""

    is_dense_BHT: torch.Tensor | None = None


class ChangedRowsBackend:
    """The Δ correction from rows whose query has turned away from the last dense row's, as anchors do
    (runs end after 512 rows), instead of every γ-th: about one in `gamma` of a layer's rows, by one cosine
    for its heads. As with Δ, the prompt's last whole block and what follows it are dense."""

    def __init__(self, options: ChangedRowsOptions) -> None:
        self._gamma = options.gamma
        self._inner = BlockSparseBackend()
        self._dense = DenseBackend()

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
        with phase("correction"):  # of every row, since no kernel takes rows that differ by head
            dense_BHTD = self._dense.attend(x, None, None, no_phase)
            out_BHTD = corrected(out_BHTD, dense_BHTD, is_dense_BHT)
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


def corrected(out_BHTD: torch.Tensor, dense_BHTD: torch.Tensor, is_dense_BHT: torch.Tensor) -> torch.Tensor:
    """Add each dense row's difference to it and the rows up to the next; the first row is dense."""
    row_T = torch.arange(out_BHTD.shape[2], device=out_BHTD.device)
    owner_BHT1 = torch.where(is_dense_BHT, row_T, 0).cummax(-1).values[..., None]
    difference_BHTD = dense_BHTD.float() - out_BHTD.float()
    return (out_BHTD + difference_BHTD.gather(2, owner_BHT1.expand_as(out_BHTD))).to(out_BHTD.dtype)
