"""Oracles of paged decode attention and page selection, one request at a time (`paged_decode.pages`)."""

from __future__ import annotations

import math

import torch

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.paged_decode.pages import PagedInput

from .kv_int8 import row_of


def paged_attention(
    x: PagedInput, request: int, columns: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute attention of one request over the pages in `columns`, token by token in float64. Return out_HD,
    lse_H and the weight of each token."""
    length = int(x.lengths_R[request])
    first = length - x.window if x.window else 0
    seen = [(c, s) for c in columns for s in range(PAGE_TOKENS) if first <= c * PAGE_TOKENS + s < length]
    outs, lses = [], []
    weights = torch.zeros(x.q_RHD.shape[1], len(columns), PAGE_TOKENS, dtype=torch.float64)
    for head in range(x.q_RHD.shape[1]):
        q, g = x.q_RHD[request, head].double().cpu(), head // x.group
        keys, values = [], []
        for column, slot in seen:
            page = int(x.table_RP[request, column])
            k_D, v_D = x.k_PSGD[page, slot, g].cpu(), x.v_PSGD[page, slot, g].cpu()
            if x.scales is not None:
                k_D = row_of(k_D, x.scales.k[page, slot, g])
                v_D = row_of(v_D, x.scales.v[page, slot, g])
            keys.append(k_D.double())
            values.append(v_D.double())
        exponents = [math.exp(x.scale * float(q @ key)) for key in keys]
        total = math.fsum(exponents)
        lses.append(math.log(total))
        out = sum(
            (e / total * value for e, value in zip(exponents, values, strict=True)),
            start=torch.zeros(len(q), dtype=torch.float64),
        )
        outs.append(out)
        for (column, slot), e in zip(seen, exponents, strict=True):
            weights[head, columns.index(column), slot] = e / total
    return torch.stack(outs), torch.tensor(lses, dtype=torch.float64), weights


def selected_pages(score_P: list[float], pages: int, budget: int, recency: int) -> list[int]:
    if pages <= budget:
        return list(range(pages))
    rivals = sorted(range(pages - recency), key=lambda column: (-score_P[column], column))
    return sorted(rivals[: budget - recency] + list(range(pages - recency, pages)))
