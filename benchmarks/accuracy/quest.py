"""Quest's page selection in decode (Tang et al. 2024), a baseline for DELTA's. It is written in torch, so it
is not timed.

Each layer after the first two chooses pages for each query head: those with the largest upper bound of q · k,
computed from the page's minimum and maximum key in each channel. The page being written is always attended
to. Shape suffixes are those of `workers.decode.decode_attention`; S tokens of a page or a request, K query
heads of a key head, C chosen pages, T their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltafront.kernels.paged_decode.dispatch import paged_attention
from deltafront.workers.decode.decode_attention import BatchRows
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for

FULL_LAYERS = 2
"""Number of first layers with full attention, as in Quest: their attention is not sparse."""


@dataclass(frozen=True)
class QuestPlan:
    """Options of Quest. budget: Maximum number of pages that a query head reads."""

    layers: int
    budget: int

    def pages_read(self, length: int, selects: bool) -> tuple[int, int]:
        """Return the number of pages that a decode step reads and the number that full decode would read,
        summed over layers that select pages. The request has `length` tokens. selects: False: the step reads
        all pages."""
        held, layers = pages_for(length), self.layers - FULL_LAYERS
        return layers * (min(held, self.budget) if selects else held), layers * held


class QuestAttention:
    """Computes attention of one decode step, in place of `StepAttention`."""

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
        lengths_R = rows.lengths_R.long()
        table_RP = rows.table_RP.long()
        held = table_RP.shape[1]
        bound_RHP = _bounds(q_RHD.float(), k_PSGD, table_RP)
        last_R = (lengths_R - 1) // PAGE_TOKENS
        place_P = torch.arange(held, device=q_RHD.device)
        bound_RHP.masked_fill_((place_P > last_R[:, None])[:, None], -torch.inf)
        bound_RHP.masked_fill_((place_P == last_R[:, None])[:, None], torch.inf)
        chosen_RHC = bound_RHP.topk(min(self._plan.budget, held), dim=-1).indices
        return self._read(q_RHD, k_PSGD, v_PSGD, table_RP, chosen_RHC, lengths_R)

    def _read(
        self,
        q_RHD: torch.Tensor,
        k_PSGD: torch.Tensor,
        v_PSGD: torch.Tensor,
        table_RP: torch.Tensor,
        chosen_RHC: torch.Tensor,
        lengths_R: torch.Tensor,
    ) -> torch.Tensor:
        """Attend only to tokens of the chosen pages. chosen_RHC: Columns of the page table."""
        heads, group = q_RHD.shape[1], q_RHD.shape[1] // k_PSGD.shape[2]
        pages_RHC = table_RP[:, None].expand(-1, heads, -1).gather(2, chosen_RHC)
        kv_head_H11 = (torch.arange(heads, device=q_RHD.device) // group).view(-1, 1, 1)
        slot_S = torch.arange(PAGE_TOKENS, device=q_RHD.device)
        k_RHTD, v_RHTD = (
            x[pages_RHC[..., None], slot_S, kv_head_H11].flatten(2, 3).float() for x in (k_PSGD, v_PSGD)
        )
        at_RHT = (chosen_RHC[..., None] * PAGE_TOKENS + slot_S).flatten(2)
        unread_RHT = at_RHT >= lengths_R[:, None, None]
        score_RHT = torch.einsum("rhd,rhtd->rht", q_RHD.float(), k_RHTD) * self._scale
        weight_RHT = score_RHT.masked_fill(unread_RHT, -torch.inf).softmax(-1)
        v_RHTD = v_RHTD.masked_fill(unread_RHT[..., None], 0.0)  # a reused page may contain NaN
        return torch.einsum("rht,rhtd->rhd", weight_RHT, v_RHTD).to(q_RHD.dtype)


def _bounds(q_RHD: torch.Tensor, k_PSGD: torch.Tensor, table_RP: torch.Tensor) -> torch.Tensor:
    """Return bound_RHP, `page_bounds` of all pages in the table. A positive channel of q is multiplied with
    the page's maximum key, a negative one with the minimum."""
    group = q_RHD.shape[1] // k_PSGD.shape[2]
    rows, heads, channels = q_RHD.shape
    q_RGKD = q_RHD.reshape(rows, heads // group, group, channels)
    least_RPGD, most_RPGD = (x_PGD.float()[table_RP] for x_PGD in (k_PSGD.amin(1), k_PSGD.amax(1)))
    up_RGKP = torch.einsum("rgkd,rpgd->rgkp", q_RGKD.clamp(min=0), most_RPGD)
    down_RGKP = torch.einsum("rgkd,rpgd->rgkp", q_RGKD.clamp(max=0), least_RPGD)
    return (up_RGKP + down_RGKP).flatten(1, 2)


def page_bounds(q_HD: torch.Tensor, k_SHD: torch.Tensor) -> torch.Tensor:
    """Return bound_PH: for each page and head an upper bound of q · k over the page's keys."""
    missing = -k_SHD.shape[0] % PAGE_TOKENS
    padded_SHD = torch.cat([k_SHD, k_SHD[-1:].expand(missing, -1, -1)])  # a repeated key changes no bound
    page_PSHD = padded_SHD.reshape(-1, PAGE_TOKENS, *k_SHD.shape[1:])
    return torch.maximum(q_HD * page_PSHD.amin(1), q_HD * page_PSHD.amax(1)).sum(-1)
