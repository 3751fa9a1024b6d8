"""Groups of rows side by side, and their products with themselves. Suffixes as in `kernel.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...anchor_scan import check_head_dim
from ...constants import BLOCK, LOG2E
from ...interface import AttentionInput
from ...launches import strides


@triton.jit(do_not_specialize=["rows"])
def _pack_kernel(
    x_ptr, out_ptr, stride_xb, stride_xg, stride_xs, x_heads, rows, padded_I,
    D: tl.constexpr, STEP: tl.constexpr, SLOTS: tl.constexpr, REVERSED: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The first SLOTS rows of each group side by side, zeros past the end, clamped to +-LIMIT."""
    lane = tl.program_id(1).to(tl.int64)
    x_ptr += lane // x_heads * stride_xb + lane % x_heads * stride_xg
    place_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot_R = place_R % SLOTS
    if REVERSED:
        slot_R = SLOTS - 1 - slot_R
    row_R = place_R // SLOTS * STEP + slot_R
    column_D = tl.arange(0, D)
    x_RD = tl.load(
        x_ptr + row_R[:, None].to(tl.int64) * stride_xs + column_D[None, :],
        mask=(row_R < rows)[:, None],
        other=0.0,
    )
    x_RD = tl.minimum(tl.maximum(x_RD.to(tl.float32), -LIMIT), LIMIT)
    place_RD = (lane * padded_I * SLOTS + place_R[:, None]) * D + column_D[None, :]
    tl.store(
        out_ptr + place_RD, x_RD.to(out_ptr.dtype.element_ty), mask=(place_R < padded_I * SLOTS)[:, None]
    )


@triton.jit(do_not_specialize=["rows", "q_start", "groups_I"])
def _own_kernel(
    q_ptr, k_ptr, own_ptr, stride_qb, stride_qh, stride_qt, stride_kb, stride_kg, stride_ks, heads, group,
    rows, q_start, groups_I, scale_log2,
    D: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Logits of groups against themselves, over pairs whose key is not after the query."""
    group_I = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // group * stride_kg
    column_D = tl.arange(0, D)
    sum_I = tl.zeros((ROWS,), tl.float32)
    for slot in range(STEP // 2, STEP):
        row_I = group_I * STEP + slot
        valid_I1 = (row_I < rows)[:, None]
        key_I = q_start + group_I * STEP + STEP - 1 - slot
        q_ID = tl.load(
            q_ptr + row_I[:, None].to(tl.int64) * stride_qt + column_D[None, :], mask=valid_I1, other=0.0
        )
        k_ID = tl.load(
            k_ptr + key_I[:, None].to(tl.int64) * stride_ks + column_D[None, :], mask=valid_I1, other=0.0
        )
        sum_I += tl.sum(q_ID.to(tl.float32) * k_ID.to(tl.float32), axis=1)
    pairs_I = tl.minimum(tl.maximum(rows - group_I * STEP - STEP // 2, 0), STEP - STEP // 2)
    own_I = tl.where(pairs_I > 0, sum_I * scale_log2 / tl.maximum(pairs_I, 1), float("-inf"))
    tl.store(own_ptr + tl.program_id(1).to(tl.int64) * groups_I + group_I, own_I, mask=group_I < groups_I)


@dataclass(frozen=True)
class Grouping:
    """Rows per group; rows of a group that are paired (all, or the first); groups per block."""

    step: int
    slots: int
    per_block: int


def packed(x_BGSD: torch.Tensor, grouping: Grouping, multiple: int, *, reverse: bool) -> torch.Tensor:
    batch, heads, rows, dim = x_BGSD.shape
    check_head_dim(dim)
    padded = triton.cdiv(triton.cdiv(rows, grouping.step), multiple) * multiple
    small = x_BGSD.element_size() == 2 and grouping.slots > 1
    dtype = torch.float8_e4m3fn if small else x_BGSD.dtype
    out_XF = torch.empty((batch * heads * padded, grouping.slots * dim), dtype=dtype, device=x_BGSD.device)
    _pack_kernel[(triton.cdiv(padded * grouping.slots, 64), batch * heads)](
        x_BGSD,
        out_XF,
        *strides(x_BGSD),
        heads,
        rows,
        padded,
        D=dim,
        STEP=grouping.step,
        SLOTS=grouping.slots,
        REVERSED=reverse,
        LIMIT=torch.finfo(dtype).max,
        ROWS=64,
        num_warps=4,
    )
    return out_XF


def own_logits(x: AttentionInput, step: int) -> torch.Tensor:
    """float32 own_BHI, times log2 e; -inf without a pair."""
    batch, heads, rows, dim = x.q_BHTD.shape
    check_head_dim(dim)
    row_groups = x.query_blocks * (BLOCK // step)
    own_BHI = torch.empty((batch, heads, row_groups), dtype=torch.float32, device=x.q_BHTD.device)
    sizes = (heads, x.group, rows, x.q_start, row_groups)
    _own_kernel[(triton.cdiv(row_groups, 32), batch * heads)](
        x.q_BHTD,
        x.k_BGSD,
        own_BHI,
        *strides(x.q_BHTD, x.k_BGSD),
        *sizes,
        x.scale * LOG2E,
        D=dim,
        STEP=step,
        ROWS=32,
        num_warps=4,
    )
    return own_BHI
