"""The DeltaXAttention executor: the reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...interface import BLOCK, AttentionInput, KernelInputError, Phase, StateSpec, TileMask
from ...methods import Value
from ..common import check_mask, runs_on_cpu
from ..packed_kv.packing import PackedRuns, Runs, SimilarRuns
from . import reference


class BlockSparsePackedExecutor:
    """DeltaAttention section 4.2: the best kept tiles and the diagonal exact, the others over packed keys.

    Options: cos, exact_share (see `methods.py`). The mask must carry scores. runs replaces the similarity
    scan (ablations); mean_keys False packs a run's anchor instead of its mean.
    """

    def __init__(
        self, values: Mapping[str, Value], *, runs: Runs | None = None, mean_keys: bool = True
    ) -> None:
        self.runs = SimilarRuns(float(values["cos"])) if runs is None else runs
        self.share = float(values["exact_share"])
        self.mean_keys = mean_keys

    def new_state(self, spec: StateSpec) -> PackedRuns:
        return PackedRuns.empty(spec, BLOCK)

    def attend(
        self, x: AttentionInput, mask: TileMask | None, state: PackedRuns, phase: Phase
    ) -> torch.Tensor:
        kept = self._check(x, mask)
        state.check(x, "block_sparse_packed")
        with phase("anchors"):
            state.extend(x.k_BGSD, BLOCK, self.runs)
        with phase("attention"):
            if runs_on_cpu(x, "block_sparse_packed"):
                return reference.attend(x, kept, state, share=self.share, mean_keys=self.mean_keys)
            from . import kernel

            return kernel.attend(x, kept, state, share=self.share, mean_keys=self.mean_keys)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: PackedRuns) -> torch.Tensor:
        """Packed rows count as 1/128 of a tile each, exact tiles as one."""
        kept = self._check(x, mask)
        if runs_on_cpu(x, "block_sparse_packed"):
            exact_BHNM = exact_table(kept, self.share)
        else:
            from . import kernel

            exact_BHNM = kernel.exact_table(kept, self.share)
        entry_M = torch.arange(kept.index_BHNM.shape[-1], device=exact_BHNM.device)
        listed_BHNM = entry_M < kept.count_BHN[..., None]
        batch, heads = x.q_BHTD.shape[:2]
        runs_BGM = torch.diff(state.offset_BGC, dim=-1, append=state.offset_BGC[..., -1:])
        runs_BHM = runs_BGM.repeat_interleave(x.group, dim=1).double() / BLOCK
        lesser_BHNM = listed_BHNM & ~exact_BHNM
        tile_BHX = torch.where(lesser_BHNM, kept.index_BHNM, 0).long().view(batch, heads, -1)
        packed_BHX = runs_BHM.gather(2, tile_BHX) * lesser_BHNM.view(batch, heads, -1)
        return packed_BHX.sum() + (listed_BHNM & exact_BHNM).sum(dtype=torch.float64)

    def _check(self, x: AttentionInput, mask: TileMask | None) -> TileMask:
        kept = check_mask(x, mask, "block_sparse_packed")
        score = kept.score_BHNM
        if score is None or score.shape != kept.index_BHNM.shape or score.dtype != torch.float32:
            raise KernelInputError(
                "block_sparse_packed needs a float32 score for every listed tile: use a selector built with "
                "the option exact_share"
            )
        return kept


def exact_table(mask: TileMask, share: float) -> torch.Tensor:
    """bool, laid out as the mask's index: which entries are attended exactly (undefined past the count)."""
    assert mask.score_BHNM is not None
    exact_BHNM = torch.zeros(mask.index_BHNM.shape, dtype=torch.bool)
    for b, h, n in torch.cartesian_prod(*(torch.arange(size) for size in mask.count_BHN.shape)).tolist():
        count = int(mask.count_BHN[b, h, n])
        exact_BHNM[b, h, n, :count] = reference.exact_entries(mask.score_BHNM[b, h, n, :count], share)
    return exact_BHNM
