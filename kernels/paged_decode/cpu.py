"""Paged decode attention, page scores and page selection on the CPU, one request at a time, in fp32.

Shape suffixes: T tokens and N pages of one request, Q query heads of one key head.
"""

import torch

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.layers.kv_int8 import dequantise
from deltafront.kernels.paged_decode.pages import PagedInput, SelectedPages


def paged_attention(x: PagedInput) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [_request(x, request, _pages(x, request, x.window)) for request in range(x.q_RHD.shape[0])]
    return torch.stack([out for out, _, _ in rows]), torch.stack([lse for _, lse, _ in rows])


def paged_attention_scored(
    x: PagedInput, span: int = PAGE_TOKENS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    requests, columns = x.table_RP.shape
    score_RS = x.q_RHD.new_zeros((requests, columns * PAGE_TOKENS // span), dtype=torch.float32)
    outs, lses = [], []
    for request in range(x.q_RHD.shape[0]):
        columns_N = _pages(x, request)
        out_HD, lse_H, weights_HT = _request(x, request, columns_N)
        score_S = weights_HT.amax(0).view(-1, span).sum(-1)
        score_RS[request, : len(score_S)] = score_S
        outs.append(out_HD)
        lses.append(lse_H)
    return torch.stack(outs), torch.stack(lses), score_RS


def paged_attention_sparse(selected: SelectedPages) -> tuple[torch.Tensor, torch.Tensor]:
    x, outs, lses = selected.x, [], []
    for request in range(x.q_RHD.shape[0]):
        columns_N = every_N = _pages(x, request)
        count = int(selected.counts_R[request])
        if count != 0:
            columns_N = selected.selected_RK[request, :count]
        if count < 0 or int(columns_N[-1]) >= len(every_N):
            raise KernelInputError(
                f"request {request}: selected columns {columns_N.tolist()} are not its own"
            )
        out_HD, lse_H, _ = _request(x, request, columns_N)
        outs.append(out_HD)
        lses.append(lse_H)
    return torch.stack(outs), torch.stack(lses)


def _pages(x: PagedInput, request: int, window: int = 0) -> torch.Tensor:
    tokens = int(x.lengths_R[request])
    pages = -(-tokens // PAGE_TOKENS)
    if tokens < 1 or pages > x.table_RP.shape[1]:
        raise KernelInputError(
            f"request {request} has {tokens} tokens, its table {x.table_RP.shape[1]} pages of {PAGE_TOKENS}"
        )
    begin = max(0, tokens - window) // PAGE_TOKENS if window else 0
    return torch.arange(begin, pages, dtype=torch.int32, device=x.q_RHD.device)


def _request(
    x: PagedInput, request: int, columns_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend to the pages in some table columns of one request. Return out_HD (q's dtype), lse_H and
    weights_HT (fp32)."""
    ids_N = x.table_RP[request].index_select(0, columns_N)
    k_PSG, v_PSG = (None, None) if x.scales is None else (x.scales.k, x.scales.v)
    k_GTD, v_GTD = _gather(x.k_PSGD, k_PSG, ids_N), _gather(x.v_PSGD, v_PSG, ids_N)
    slots_S = torch.arange(PAGE_TOKENS, device=columns_N.device)
    place_T = (columns_N[:, None] * PAGE_TOKENS + slots_S).flatten()
    unseen_T = place_T >= x.lengths_R[request]
    if x.window:
        unseen_T |= place_T < x.lengths_R[request] - x.window
    for page in (
        slice(PAGE_TOKENS),
        slice(-PAGE_TOKENS, None),
    ):  # only the first and last page have masked tokens
        if bool(unseen_T[page].any()):
            v_GTD[:, page].masked_fill_(unseen_T[page, None], 0)
    q_GQD = x.q_RHD[request].float().reshape(k_GTD.shape[0], x.group, -1)
    logits_GQT = (q_GQD * x.scale) @ k_GTD.mT
    logits_GQT.masked_fill_(unseen_T, float("-inf"))
    lse_GQ = logits_GQT.logsumexp(-1)
    weights_GQT = (logits_GQT - lse_GQ[..., None]).exp_()
    out_GQD = weights_GQT @ v_GTD
    return out_GQD.flatten(0, 1).to(x.q_RHD.dtype), lse_GQ.flatten(), weights_GQT.flatten(0, 1)


def _gather(pages_PSGD: torch.Tensor, scales_PSG: torch.Tensor | None, ids_N: torch.Tensor) -> torch.Tensor:
    chosen_NSGD = pages_PSGD.index_select(0, ids_N)
    if scales_PSG is not None:
        chosen_NSGD = dequantise(chosen_NSGD, scales_PSG.index_select(0, ids_N), torch.float32)
    return chosen_NSGD.flatten(0, 1).transpose(0, 1).float()


def select_pages(
    page_score_RP: torch.Tensor, lengths_R: torch.Tensor, *, budget: int, recency: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `page_selection.select_pages` on the CPU."""
    columns_P = torch.arange(page_score_RP.shape[1], device=page_score_RP.device)
    pages_R1 = ((lengths_R + PAGE_TOKENS - 1) // PAGE_TOKENS)[:, None]
    rival_RP = columns_P < pages_R1 - recency
    score_RP = page_score_RP.masked_fill(~rival_RP, float("-inf"))
    order_RP = score_RP.argsort(dim=1, descending=True, stable=True)
    rank_RP = torch.empty_like(order_RP).scatter_(1, order_RP, columns_P.expand_as(order_RP))
    kept_RP = ~rival_RP | (rank_RP < budget - recency) | (pages_R1 <= budget)
    kept_RP &= columns_P < pages_R1
    past = page_score_RP.shape[1]
    ascending_RP = torch.where(kept_RP, columns_P, past).sort(dim=1).values[:, :budget]
    selected_RK = torch.zeros(len(lengths_R), budget, dtype=torch.int32, device=page_score_RP.device)
    selected_RK[:, : ascending_RP.shape[1]] = ascending_RP.where(ascending_RP < past, 0)
    return selected_RK, kept_RP.sum(1, dtype=torch.int32)
