"""Quest's page selection in decode (Tang et al. 2024), as a baseline for DELTA's. In torch, and not timed.

Every layer but the first two chooses pages for each query head by itself: those with the largest upper bound
of q·k, which each page's least and largest key of every channel give. The page being written is always read.
Shape suffixes as in `workers.decode.decode_attention`; S tokens of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltafront.kernels.paged_decode.dispatch import paged_attention
from deltafront.workers.decode.decode_attention import BatchRows
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for

FULL_LAYERS = 2
"""Quest's own choice: these have little to leave out."""


@dataclass(frozen=True)
class QuestPlan:
    """budget: pages for each head."""

    layers: int
    budget: int

    def pages_read(self, length: int, selects: bool) -> tuple[int, int]:
        """Count the pages that selecting layers read over `length` tokens, and those they could read."""
        held, layers = pages_for(length), self.layers - FULL_LAYERS
        return layers * (min(held, self.budget) if selects else held), layers * held


class QuestAttention:
    """Attention of one decode step, as `StepAttention`."""

    def __init__(self, plan: QuestPlan, rows: BatchRows, scale: float) -> None:
        self._plan = plan
        self._rows = rows
        self._scale = scale

    def attend(
        self, layer: int, q_RHD: torch.Tensor, k_PSGD: torch.Tensor, v_PSGD: torch.Tensor
    ) -> torch.Tensor:
        rows = self._rows
        if layer < FULL_LAYERS:
            args = q_RHD, k_PSGD, v_PSGD, rows.table_RP, rows.lengths_R
            return paged_attention(*args, scale=self._scale)[0]
        out_RHD = torch.empty_like(q_RHD)
        for row, length in enumerate(rows.lengths_R.tolist()):
            table_P = rows.table_RP[row, : pages_for(length)].long()
            group = q_RHD.shape[1] // k_PSGD.shape[2]
            k_SHD, v_SHD = (
                x[table_P].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
                for x in (k_PSGD, v_PSGD)
            )
            out_RHD[row] = self._attend_row(q_RHD[row].float(), k_SHD, v_SHD)
        return out_RHD

    def _attend_row(self, q_HD: torch.Tensor, k_SHD: torch.Tensor, v_SHD: torch.Tensor) -> torch.Tensor:
        bound_PH = page_bounds(q_HD, k_SHD)
        bound_PH[-1] = float("inf")
        budget = min(self._plan.budget, bound_PH.shape[0])
        chosen_PH = torch.zeros_like(bound_PH, dtype=torch.bool)
        chosen_PH.scatter_(0, bound_PH.topk(budget, dim=0).indices, True)
        read_SH = chosen_PH.repeat_interleave(PAGE_TOKENS, dim=0)[: k_SHD.shape[0]]
        score_SH = (torch.einsum("hd,shd->sh", q_HD, k_SHD) * self._scale).masked_fill(~read_SH, -torch.inf)
        return torch.einsum("sh,shd->hd", score_SH.softmax(0), v_SHD)


def page_bounds(q_HD: torch.Tensor, k_SHD: torch.Tensor) -> torch.Tensor:
    """Return for each page and head a number that q·k of none of the page's keys exceeds: bound_PH."""
    missing = -k_SHD.shape[0] % PAGE_TOKENS
    padded_SHD = torch.cat([k_SHD, k_SHD[-1:].expand(missing, -1, -1)])  # a key once more changes no bound
    page_PSHD = padded_SHD.reshape(-1, PAGE_TOKENS, *k_SHD.shape[1:])
    return torch.maximum(q_HD * page_PSHD.amin(1), q_HD * page_PSHD.amax(1)).sum(-1)
