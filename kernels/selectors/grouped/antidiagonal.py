"""XAttention: ranks tiles by antidiagonal sums in stride x stride cells (Xu et al. 2025, sections 2.1-2.2).

Suffixes: I, J groups of `stride` query or key rows, S = stride in grouped tensors.
"""

import torch
from torch.nn import functional

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, KernelInputError
from deltafront.kernels.options import AntidiagonalOptions
from deltafront.kernels.selectors.grouped.kernel import Grouping, Groups, own_logits, pack
from deltafront.kernels.selectors.grouped.selector import GroupedSelector, per_query_head, tile_scores


class AntidiagonalSelector(GroupedSelector):
    name = "antidiagonal"

    def __init__(self, options: AntidiagonalOptions, *, with_scores: bool = False) -> None:
        super().__init__(options, with_scores)
        self.stride = options.stride
        if self.stride not in (4, 8, 16, 64):
            raise KernelInputError(f"stride {self.stride} is not 4, 8, 16 or 64")
        self.scored_share = 1.0 / self.stride

    def groups(self, x: AttentionInput) -> Groups:
        grouping = Grouping(self.stride, self.stride, BLOCK // self.stride)
        own_BHI = own_logits(x, self.stride)
        return pack(x.q_BHTD, x.k_BGSD, x.q_start, x.scale, grouping, own_BHI)

    def cpu_form(self, x: AttentionInput) -> torch.Tensor:
        return cpu_scores(x, self.stride)


def scoring_selector(options: AntidiagonalOptions) -> AntidiagonalSelector:
    """Make an XAttention selector whose masks carry scores, for `delta_xattention`."""
    return AntidiagonalSelector(options, with_scores=True)


def cpu_scores(x: AttentionInput, stride: int) -> torch.Tensor:
    """Compute XAttention's tile scores, float32 score_BHNM.

    A cell's logit is the mean of q . k over its antidiagonal: row u against key stride-1-u. After a softmax
    over the causal key groups, the cells of a tile are summed. Unlike in the authors' code, diagonal cells
    count only causal pairs, and incomplete groups only existing rows.
    """
    rows, dim = x.q_BHTD.shape[2:]
    per_block = BLOCK // stride
    q_BHTD, k_BGSD = _padded(x.q_BHTD), _padded(x.k_BGSD)
    q_BHISD = q_BHTD.view(*q_BHTD.shape[:2], -1, stride, dim)
    k_BGJSD = k_BGSD.view(*k_BGSD.shape[:2], -1, stride, dim).flip(3)
    logit_BHIJ = per_query_head(k_BGJSD.flatten(3), q_BHISD.flatten(3)) * x.scale

    device = q_BHTD.device
    group_I = torch.arange(q_BHISD.shape[2], device=device)
    filled_I = torch.clamp(rows - group_I * stride, 0, stride)
    logit_BHIJ /= filled_I.clamp(min=1)[:, None]

    own_I = group_I + x.first_block * per_block
    own_BHISD = k_BGJSD[:, :, own_I].repeat_interleave(x.group, dim=1)
    late = stride // 2
    pairs_I = torch.clamp(filled_I - late, min=0)
    own_BHI = (q_BHISD[..., late:, :] * own_BHISD[..., late:, :]).sum((-1, -2)) * x.scale
    logit_BHIJ[:, :, group_I, own_I] = own_BHI / pairs_I.clamp(min=1)

    column_J = torch.arange(k_BGJSD.shape[2], device=device)
    allowed_IJ = (column_J < own_I[:, None]) & (filled_I > 0)[:, None]
    allowed_IJ[group_I, own_I] = pairs_I > 0
    return tile_scores(logit_BHIJ, allowed_IJ, per_block)


def _padded(x: torch.Tensor) -> torch.Tensor:
    return functional.pad(x.float(), (0, 0, 0, -x.shape[2] % BLOCK))
