"""Tiles ranked by every stride-th row of q and k. Suffixes: I, J sampled rows."""

from __future__ import annotations

import torch
from torch.nn import functional

from ...constants import BLOCK
from ...interface import AttentionInput, KernelInputError, Phase
from ...options import NaiveOptions
from ..rules.sums import Sums
from ..scored import ScoredSelector, SlabSums
from .cpu import per_query_head, tile_scores
from .kernel import log_sums, pack
from .packing import Grouping


class NaiveSelector(ScoredSelector):
    name = "naive"

    def __init__(self, options: NaiveOptions) -> None:
        super().__init__(options)
        self.stride = options.stride
        if self.stride not in (2, 4, 8, 16):
            raise KernelInputError(f"stride {self.stride} is not 2, 4, 8 or 16")
        self.sampled = 1.0 / self.stride**2

    def cpu_scores(self, x: AttentionInput, state: object, phase: Phase) -> torch.Tensor:
        with phase("scoring"):
            return cpu_scores(x, self.stride)

    def slab_sums(self, x: AttentionInput, state: object, phase: Phase) -> tuple[int, SlabSums]:
        per_block = BLOCK // self.stride
        with phase("scoring"):
            groups = pack(x.q_BHTD, x.k_BGSD, x.q_start, x.scale, Grouping(self.stride, 1, per_block))
        return per_block, lambda first, blocks: Sums(log_sums(groups, first, blocks), first)


def cpu_scores(x: AttentionInput, stride: int) -> torch.Tensor:
    """The attention of sampled query rows over sampled keys up to each, added up in tiles: float32
    score_BHNM."""

    per_block = BLOCK // stride
    q_BHID, k_BGJD = _sampled(x.q_BHTD, stride), _sampled(x.k_BGSD, stride)
    logit_BHIJ = per_query_head(k_BGJD, q_BHID) * x.scale
    own_I = torch.arange(q_BHID.shape[2], device=q_BHID.device)
    valid_I = own_I * stride < x.q_BHTD.shape[2]
    own_I = own_I + x.first_block * per_block
    column_J = torch.arange(k_BGJD.shape[2], device=q_BHID.device)
    return tile_scores(logit_BHIJ, (column_J <= own_I[:, None]) & valid_I[:, None], per_block)


def _sampled(x: torch.Tensor, stride: int) -> torch.Tensor:
    """float32 rows 0, stride, 2 stride, ..., filled up with zeros to whole blocks."""
    return functional.pad(x[:, :, ::stride].float(), (0, 0, 0, (-x.shape[2] % BLOCK) // stride))
