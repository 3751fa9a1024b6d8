"""Delta-KV in fp32, on the CPU. Shape suffixes as in `packing.py`; J keys that a query block attends to."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from ...interface import BLOCK, AttentionInput
from .packing import PackedRuns, packed_chunks


def pack_head(
    k_SD: torch.Tensor, v_SD: torch.Tensor, start_P: torch.Tensor, end: int, mean_keys: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row per run: the mean key (or the anchor's), the mean value, the run's length n.

    start_P: first rows of the runs, which cover positions start_P[0] .. end-1. Packed rows are kept as the
    cache keeps its rows, so means are rounded to the type of k and v; all results are then fp32.
    """
    length_P = torch.diff(start_P, append=start_P.new_tensor([end]))
    first = int(start_P[0])
    run_S = torch.repeat_interleave(torch.arange(start_P.numel()), length_P.long())
    zeros_PD = torch.zeros(start_P.numel(), k_SD.shape[1])
    values_PD = (zeros_PD.index_add(0, run_S, v_SD[first:end].float()) / length_P[:, None]).to(v_SD.dtype)
    if mean_keys:
        keys_PD = (zeros_PD.index_add(0, run_S, k_SD[first:end].float()) / length_P[:, None]).to(k_SD.dtype)
    else:
        keys_PD = k_SD.index_select(0, start_P)
    return keys_PD.float(), values_PD.float(), length_P.float()


def attend(
    x: AttentionInput, state: PackedRuns, *, chunk: int, critical: int, counts: bool, mean_keys: bool = True
) -> torch.Tensor:
    """Phase 1 over the packed chunks before each query block's critical region, phase 2 exact over the rest.

    A packed key of n rows weighs n * exp(s) when `counts` (the thesis's formula (4)), else exp(s).
    """
    out_BHTD = torch.empty(x.q_BHTD.shape, dtype=x.q_BHTD.dtype)
    chunks_N = packed_chunks(x.first_block, x.query_blocks, critical, chunk)
    for b in range(x.q_BHTD.shape[0]):
        for g in range(x.k_BGSD.shape[1]):
            heads = slice(g * x.group, (g + 1) * x.group)
            offset_C = state.offset_BGC[b, g].tolist()
            packed = None
            if chunks_N[-1] > 0:
                start_P = state.start_BGP[b, g, : offset_C[chunks_N[-1]]]
                end = chunks_N[-1] * chunk
                packed = pack_head(x.k_BGSD[b, g], x.v_BGSD[b, g], start_P, end, mean_keys)
            for n, done in enumerate(chunks_N):
                rows = slice(n * BLOCK, min((n + 1) * BLOCK, x.q_BHTD.shape[2]))
                kept = None if packed is None else tuple(part[: offset_C[done]] for part in packed)
                out = _attend_block(x, b, g, rows, done * chunk, kept, counts)
                out_BHTD[b, heads, rows] = out.to(out_BHTD.dtype)
    return out_BHTD


def _attend_block(
    x: AttentionInput,
    b: int,
    g: int,
    rows: slice,
    exact_from: int,
    packed: tuple[torch.Tensor, ...] | None,
    counts: bool,
) -> torch.Tensor:
    """One query block of a group's heads: packed rows, then exact keys exact_from .. the last row's own."""
    end = x.q_start + rows.stop
    k_JD, v_JD = x.k_BGSD[b, g, exact_from:end].float(), x.v_BGSD[b, g, exact_from:end].float()
    position_T1 = torch.arange(x.q_start + rows.start, end)[:, None]
    seen = torch.arange(exact_from, end) <= position_T1
    bias_TJ = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    if packed is not None:
        keys_PD, values_PD, length_P = packed
        k_JD, v_JD = torch.cat([keys_PD, k_JD]), torch.cat([values_PD, v_JD])
        weight_P = length_P.log() if counts else torch.zeros_like(length_P)
        bias_TJ = torch.cat([weight_P.expand(seen.shape[0], -1), bias_TJ], dim=1)
    heads = slice(g * x.group, (g + 1) * x.group)
    q_HTD = x.q_BHTD[b, heads, rows].float()
    shape = (1, x.group, *k_JD.shape)
    return scaled_dot_product_attention(
        q_HTD[None],
        k_JD[None, None].expand(shape),
        v_JD[None, None].expand(shape),
        attn_mask=bias_TJ,
        scale=x.scale,
    )[0]
