"""XAttention: ranks tiles by antidiagonal sums in stride x stride cells (Xu et al. 2025, sections 2.1-2.2).

Shape suffixes: I, J groups of `stride` query or key rows, S = stride in grouped tensors.
"""

from typing import Any

import torch
from torch.nn import functional

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, KernelInputError, Phase
from deltafront.kernels.options import AntidiagonalOptions
from deltafront.kernels.selectors.grouped.kernel import log_sums, own_logits, packed_keys
from deltafront.kernels.selectors.rules.sums import Sums
from deltafront.kernels.selectors.scored import SlabSelector, SlabSums


class AntidiagonalSelector(SlabSelector):
    name = "antidiagonal"

    def __init__(self, options: AntidiagonalOptions, *, with_scores: bool = False) -> None:
        super().__init__(options, with_scores)
        self.stride = options.stride
        if self.stride not in (4, 8, 16, 64):
            raise KernelInputError(f"stride {self.stride} is not 4, 8, 16 or 64")
        self.scored_share = 1.0 / self.stride

    def cpu_scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        with phase("scoring"):
            return cpu_scores(x, self.stride)

    def slab_sums(self, x: AttentionInput, state: Any, phase: Phase) -> tuple[int, SlabSums]:
        with phase("scoring"):
            k_XF, own_BHI = packed_keys(x.k_BGSD, self.stride), own_logits(x, self.stride)

        def sums(first: int, blocks: int) -> Sums:
            return Sums(log_sums(x, k_XF, own_BHI, self.stride, first, blocks), first)

        return BLOCK // self.stride, sums


def scoring_selector(options: AntidiagonalOptions) -> AntidiagonalSelector:
    """Make an XAttention selector whose masks contain scores, for `delta_xattention`."""
    return AntidiagonalSelector(options, with_scores=True)


def cpu_scores(x: AttentionInput, stride: int) -> torch.Tensor:
    """Compute XAttention's tile scores, float32 score_BHNM.

    A cell is one query group by one key group. Its logit is the mean of q . k over its antidiagonal: row u
    against key stride-1-u. After a softmax over the causal key groups, the cells of a tile are summed. Unlike
    the authors' code, a cell's mean includes only causal pairs of rows that exist.
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


def tile_scores(logit_BHIJ: torch.Tensor, allowed_IJ: torch.Tensor, per_block: int) -> torch.Tensor:
    """Compute the softmax of every row over its allowed columns, and add up tiles of per_block x per_block
    groups. Return float32 score_BHNM. A row without an allowed column adds 0."""
    logit_BHIJ = logit_BHIJ.masked_fill(~allowed_IJ, float("-inf"))
    mass_BHIJ = torch.softmax(logit_BHIJ, dim=-1).nan_to_num(0.0)
    batch, heads, rows, columns = mass_BHIJ.shape
    tiles = mass_BHIJ.view(batch, heads, rows // per_block, per_block, columns // per_block, per_block)
    return tiles.sum(dim=(3, 5))


def per_query_head(k_BGJX: torch.Tensor, q_BHIX: torch.Tensor) -> torch.Tensor:
    """Compute q . k between every query head's groups and its key head's groups: logit_BHIJ."""
    batch, heads, rows, width = q_BHIX.shape
    groups = k_BGJX.shape[1]
    stacked = q_BHIX.reshape(batch, groups, heads // groups * rows, width)
    return (stacked @ k_BGJX.transpose(2, 3)).view(batch, heads, rows, k_BGJX.shape[2])
