"""Ablations that share the served methods' kernels: strided rows, and packing with other numbers.

Suffixes: I, J query and key groups.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ...kernels.constants import BLOCK
from ...kernels.executors.packed.delta_kv import DeltaKVExecutor
from ...kernels.executors.packed.delta_xattention import DeltaXAttentionExecutor
from ...kernels.interface import AttentionInput, KernelInputError
from ...kernels.selectors.grouped.kernel import Grouping, Groups, pack
from ...kernels.selectors.grouped.selector import GroupedSelector, per_query_head, tile_scores
from .methods import DeltaKVFormsOptions, DeltaXAttentionFormsOptions, NaiveOptions


class NaiveSelector(GroupedSelector):
    """Ranks tiles by every stride-th row of q and k."""

    name = "naive"

    def __init__(self, options: NaiveOptions) -> None:
        super().__init__(options)
        self.stride = options.stride
        if self.stride not in (2, 4, 8, 16):
            raise KernelInputError(f"stride {self.stride} is not 2, 4, 8 or 16")
        self.sampled = 1.0 / self.stride**2

    def groups(self, x: AttentionInput) -> Groups:
        grouping = Grouping(self.stride, 1, BLOCK // self.stride)
        return pack(x.q_BHTD, x.k_BGSD, x.q_start, x.scale, grouping)

    def cpu_form(self, x: AttentionInput) -> torch.Tensor:
        """Compute the attention of sampled query rows to sampled keys up to each, added up in tiles."""
        per_block = BLOCK // self.stride
        q_BHID, k_BGJD = _sampled(x.q_BHTD, self.stride), _sampled(x.k_BGSD, self.stride)
        logit_BHIJ = per_query_head(k_BGJD, q_BHID) * x.scale
        own_I = torch.arange(q_BHID.shape[2], device=q_BHID.device)
        valid_I = own_I * self.stride < x.q_BHTD.shape[2]
        own_I = own_I + x.first_block * per_block
        column_J = torch.arange(k_BGJD.shape[2], device=q_BHID.device)
        return tile_scores(logit_BHIJ, (column_J <= own_I[:, None]) & valid_I[:, None], per_block)


def _sampled(x: torch.Tensor, stride: int) -> torch.Tensor:
    return functional.pad(x[:, :, ::stride].float(), (0, 0, 0, (-x.shape[2] % BLOCK) // stride))


class DeltaKVForms(DeltaKVExecutor):
    def __init__(self, options: DeltaKVFormsOptions) -> None:
        super().__init__(options)
        self.counts, self.critical, self.distance = options.counts, options.critical, options.distance


class DeltaXAttentionForms(DeltaXAttentionExecutor):
    def __init__(self, options: DeltaXAttentionFormsOptions) -> None:
        super().__init__(options)
        self.distance, self.exact_share = options.distance, options.exact_share
