"""Oracles of attention: dense, block-sparse, Delta-KV, DeltaXAttention, and the Δ correction."""

from __future__ import annotations

import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput


def reference_attention(x: AttentionInput, kept_BHNM: torch.Tensor | None = None) -> torch.Tensor:
    """Compute causal attention with a float64 score matrix, masking tiles outside kept_BHNM. Returns fp32."""
    batch, heads, rows, dim = x.q_BHTD.shape
    q = x.q_BHTD.double().reshape(batch, -1, x.group, rows, dim)
    k, v = x.k_BGSD.double()[:, :, None], x.v_BGSD.double()[:, :, None]
    scores = (q @ k.mT * x.scale).reshape(batch, heads, rows, -1)
    position_T1 = x.q_start + torch.arange(rows, device=scores.device)[:, None]
    column_S = torch.arange(x.k_BGSD.shape[2], device=scores.device)
    seen = column_S <= position_T1
    if kept_BHNM is not None:
        row_block = (position_T1[:, 0] - x.q_start) // BLOCK
        seen = seen & kept_BHNM[..., row_block, :][..., column_S // BLOCK]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = weights.reshape(batch, -1, x.group, rows, weights.shape[-1]) @ v
    return out.reshape(batch, heads, rows, dim).float()


def packed_attention(
    x: AttentionInput, starts: list[int], critical: int, *, means: bool, chunk: int
) -> torch.Tensor:
    """Compute Delta-KV of one head row by row, with each run's mean or anchor repeated. Return fp32.

    starts: First positions of runs.
    """
    q, k, v = x.q_BHTD[0, 0].double(), x.k_BGSD[0, 0].double(), x.v_BGSD[0, 0].double()
    rows = []
    for position in range(q.shape[0]):
        exact_from = max(0, position // BLOCK * BLOCK - critical) // chunk * chunk
        keys, values = [], []
        for first, stop in zip(starts, [*starts[1:], k.shape[0]], strict=True):
            if first < exact_from:
                keys += [k[first:stop].mean(0) if means else k[first]] * (stop - first)
                values += [v[first:stop].mean(0) if means else v[first]] * (stop - first)
        keys += list(k[exact_from : position + 1])
        values += list(v[exact_from : position + 1])
        weights = (torch.stack(keys) @ q[position] * x.scale).softmax(0)
        rows.append(weights @ torch.stack(values))
    return torch.stack(rows)[None, None].float()


def mixed_attention(
    x: AttentionInput,
    exact_HNM: torch.Tensor,
    packed_HNM: torch.Tensor,
    starts: list[list[int]],
    *,
    means: bool,
) -> torch.Tensor:
    """Compute DeltaXAttention of one sequence row by row. In packed tiles, each run's mean or anchor is
    repeated. Return fp32.

    Args:
        exact_HNM, packed_HNM: bool, by query block and key block. The diagonal is exact.
        starts: First positions of each key head's runs, which do not cross tiles.
    """
    out_BHTD = torch.zeros(x.q_BHTD.shape)
    for h in range(x.q_BHTD.shape[1]):
        g = h // x.group
        k, v = x.k_BGSD[0, g].double().clone(), x.v_BGSD[0, g].double().clone()
        packed_k, packed_v = k.clone(), v.clone()
        for first, stop in zip(starts[g], [*starts[g][1:], k.shape[0]], strict=True):
            packed_k[first:stop] = k[first:stop].mean(0) if means else k[first]
            packed_v[first:stop] = v[first:stop].mean(0) if means else v[first]
        for row in range(x.q_BHTD.shape[2]):
            keys, values = [], []
            for m in range((x.q_start + row) // BLOCK + 1):
                tile = slice(m * BLOCK, min((m + 1) * BLOCK, x.q_start + row + 1))
                if bool(exact_HNM[h, row // BLOCK, m]):
                    keys.append(k[tile])
                    values.append(v[tile])
                elif bool(packed_HNM[h, row // BLOCK, m]):
                    keys.append(packed_k[tile])
                    values.append(packed_v[tile])
            logits = torch.cat(keys) @ x.q_BHTD[0, h, row].double() * x.scale
            out_BHTD[0, h, row] = (logits.softmax(0) @ torch.cat(values)).float()
    return out_BHTD


def corrected(x: AttentionInput, sparse_BHTD: torch.Tensor, gamma: int, *, spread: float) -> torch.Tensor:
    """Correct sparse_BHTD row by row by Δ Attention's equation 6, times `spread` after a dense row."""
    dense_BHTD = reference_attention(x)
    out_BHTD = sparse_BHTD.clone()
    for row in range(out_BHTD.shape[2]):
        anchor = row // gamma * gamma
        if row >= (x.prompt_tokens // BLOCK - 1) * BLOCK:
            out_BHTD[:, :, row] = dense_BHTD[:, :, row]
        else:
            factor = 1 if row == anchor else spread
            out_BHTD[:, :, row] += factor * (dense_BHTD[:, :, anchor] - sparse_BHTD[:, :, anchor])
    return out_BHTD
