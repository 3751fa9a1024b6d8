"""Every stride-th row of q and k. Shape suffixes as in `kernels.interface`; I, J sampled rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..constants import BLOCK
from ..executors.block_sparse import BlockSparseExecutor
from ..interface import AttentionInput, KernelInputError, Phase
from ..methods import register
from ..options import option
from .scored import ScoredOptions, ScoredSelector, SlabSums

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NaiveOptions(ScoredOptions):
    """The ablation that DeltaAttention section 4.3 compares its anchors with."""

    stride: int = option(4, 2, 16, "every stride-th row of q and k is scored", (2, 4, 8, 16))


class NaiveSelector(ScoredSelector):
    """Strided rows; on the GPU the first row of every group (`grouped_kernel.py`)."""

    name = "naive"

    def __init__(self, options: NaiveOptions) -> None:
        super().__init__(options.rule)
        self.stride = options.stride
        if self.stride not in (2, 4, 8, 16):
            raise KernelInputError(f"stride {self.stride} is not 2, 4, 8 or 16")
        self.sampled = 1.0 / self.stride**2

    def cpu_scores(self, x: AttentionInput, state: object, phase: Phase) -> torch.Tensor:
        with phase("scoring"):
            return cpu_scores(x, self.stride)

    def slab_sums(self, x: AttentionInput, state: object, phase: Phase) -> tuple[int, SlabSums]:
        from .grouped_kernel import log_sums, pack
        from .packing_kernel import Grouping
        from .rules.sums import Sums

        per_block = BLOCK // self.stride
        with phase("scoring"):
            groups = pack(x.q_BHTD, x.k_BGSD, x.q_start, x.scale, Grouping(self.stride, 1, per_block))
        return per_block, lambda first, blocks: Sums(log_sums(groups, first, blocks), first)


def cpu_scores(x: AttentionInput, stride: int) -> torch.Tensor:
    """Tile scores from every stride-th row of q and k: float32 score_BHNM.

    The attention of the sampled query rows over the sampled keys up to each, added up in tiles.
    """
    import torch

    from .grouped import per_query_head, tile_scores

    per_block = BLOCK // stride
    q_BHID, k_BGJD = _sampled(x.q_BHTD, stride), _sampled(x.k_BGSD, stride)
    logit_BHIJ = per_query_head(k_BGJD, q_BHID) * x.scale
    own_I = torch.arange(q_BHID.shape[2], device=q_BHID.device)
    real_I = own_I * stride < x.q_BHTD.shape[2]
    own_I = own_I + x.first_block * per_block
    column_J = torch.arange(k_BGJD.shape[2], device=q_BHID.device)
    return tile_scores(logit_BHIJ, (column_J <= own_I[:, None]) & real_I[:, None], per_block)


def _sampled(x: torch.Tensor, stride: int) -> torch.Tensor:
    """float32 rows 0, stride, 2 stride, ..., filled up with zeros to whole blocks."""
    from torch.nn import functional

    return functional.pad(x[:, :, ::stride].float(), (0, 0, 0, (-x.shape[2] % BLOCK) // stride))


register(
    "naive",
    NaiveOptions,
    NaiveSelector,
    BlockSparseExecutor,
    source="DeltaAttention, ablation of section 4.3",
    from_keys=True,
)
