"""Fills anchor slots on the GPU. One kernel computes `next` from each block's Gram matrix (`anchor_scan.py`),
a second follows `next` to find the runs, a third copies their first rows into slots.

Shape suffixes: R rows of a block, Z lanes = levels (L) x batch x heads x blocks. A level is a cosine
threshold.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from deltafront.kernels.anchor_scan import ROUNDING, check_head_dim
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.launches import Launcher, cdiv, strides
from deltafront.kernels.selectors.anchors.form import AnchorSettings, BlockAnchors, SideSettings

_BLOCK = tl.constexpr(BLOCK)
_ROUNDING = tl.constexpr(ROUNDING)


@triton.jit(do_not_specialize=["rows", "blocks"])
def _next_kernel(
    x_ptr, next_ptr, stride_xb, stride_xg, stride_xs, kv_heads, rows, blocks, cos, relaxed_cos, stride_nl,
    D: tl.constexpr, LEVELS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """For each row of a block and each threshold, find the first later row that is not close (BLOCK if none).
    CENTRED: subtract the block's mean first; the Gram matrix of centred rows follows from that of the
    rows."""
    block = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    x_ptr += lane // kv_heads * stride_xb + lane % kv_heads * stride_xg
    row_R = tl.arange(0, _BLOCK)
    valid_R = block * _BLOCK + row_R < rows
    x_RD = tl.load(
        x_ptr + (block * _BLOCK + row_R[:, None]).to(tl.int64) * stride_xs + tl.arange(0, D)[None, :],
        mask=valid_R[:, None],
        other=0.0,
    )
    dot_RR = tl.dot(x_RD, tl.trans(x_RD), input_precision="ieee")
    least = 0.0
    if CENTRED:
        height = tl.minimum(rows - block * _BLOCK, _BLOCK).to(tl.float32)
        by_mean_R = tl.sum(dot_RR, axis=1) / height
        square_RR = tl.where(row_R[:, None] == row_R[None, :], dot_RR, 0.0)
        least = _ROUNDING * tl.sum(tl.sum(square_RR, axis=1), axis=0) / height
        dot_RR += tl.sum(by_mean_R, axis=0) / height - by_mean_R[:, None] - by_mean_R[None, :]
    square_RR = tl.where(row_R[:, None] == row_R[None, :], dot_RR, 0.0)
    square_R = tl.sum(square_RR, axis=1)
    length_R = tl.sqrt_rn(tl.where(square_R > least, square_R, 0.0))
    length_R = tl.where(length_R > 0.0, length_R, float("inf"))  # so that a zero row has cosine 0
    later_RR = (row_R[None, :] > row_R[:, None]) & valid_R[None, :]
    out = next_ptr + (lane * blocks + block) * _BLOCK + row_R
    for level in tl.static_range(LEVELS):
        threshold = cos if level == 0 else relaxed_cos
        threshold = tl.where(threshold == 0.0, -1e-30, threshold)  # 0 x inf would be NaN
        close_RR = dot_RR >= (threshold * length_R)[:, None] * length_R[None, :]
        end_R = tl.min(tl.where(later_RR & (close_RR == 0), row_R[None, :], _BLOCK), axis=1)
        tl.store(out + level * stride_nl, end_R.to(tl.uint8))


@triton.jit(do_not_specialize=["lanes"])
def _orbit_kernel(next_ptr, start_ptr, runs_ptr, lanes, Z: tl.constexpr):
    lane_Z = tl.program_id(0).to(tl.int64) * Z + tl.arange(0, Z)
    valid_Z = lane_Z < lanes
    row_Z = tl.where(valid_Z, 0, _BLOCK)
    runs_Z = tl.zeros((Z,), tl.int32)
    lowest = tl.min(row_Z, axis=0)
    while lowest < _BLOCK:
        active_Z = row_Z < _BLOCK
        tl.store(start_ptr + lane_Z * _BLOCK + runs_Z, row_Z.to(tl.uint8), mask=active_Z)
        runs_Z += active_Z.to(tl.int32)
        row_Z = tl.load(next_ptr + lane_Z * _BLOCK + row_Z, mask=active_Z, other=_BLOCK).to(tl.int32)
        lowest = tl.min(row_Z, axis=0)
    tl.store(runs_ptr + lane_Z, runs_Z, mask=valid_Z)


@triton.jit(do_not_specialize=["stride_ab", "stride_ag", "rows", "blocks", "lanes", "first_block"])
def _fill_kernel(
    x_ptr, start_ptr, runs_ptr, vector_ptr, first_ptr, count_ptr, stride_xb, stride_xg, stride_xs,
    stride_vb, stride_vg, stride_ab, stride_ag, kv_heads, rows, blocks, lanes, first_block,
    D: tl.constexpr, CAP: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    lane = tl.program_id(1).to(tl.int64) * blocks + block
    runs = tl.load(runs_ptr + lane)
    if LEVELS == 2:
        lane = tl.where(runs > CAP, lane + lanes, lane)
        runs = tl.load(runs_ptr + lane)
    height = tl.minimum(rows - block * _BLOCK, _BLOCK)

    slot_A = tl.arange(0, CAP)
    crowded = runs > CAP
    filled_A = slot_A < tl.minimum(runs, CAP)  # an empty slot copies slot 0 and has count 0
    run_A = tl.where(crowded, slot_A * runs // CAP, slot_A)
    after_A = run_A + 1
    start_ptr += lane * _BLOCK
    first_A = tl.load(start_ptr + run_A, mask=filled_A, other=0).to(tl.int32)
    end_A = tl.load(start_ptr + after_A, mask=filled_A & (after_A < runs), other=0).to(tl.int32)
    end_A = tl.where(filled_A, tl.where(after_A < runs, end_A, height), 0)
    column_D = tl.arange(0, D)
    x_ptr += batch * stride_xb + kv_head * stride_xg
    vector_AD = tl.load(
        x_ptr + (block * _BLOCK + first_A[:, None]).to(tl.int64) * stride_xs + column_D[None, :]
    )

    table = batch * stride_ab + kv_head * stride_ag + block.to(tl.int64) * CAP
    tl.store(first_ptr + table + slot_A, first_A + (first_block + block) * _BLOCK)
    tl.store(count_ptr + table + slot_A, tl.where(filled_A, end_A - first_A, 0).to(tl.float32))
    vector_ptr += batch * stride_vb + kv_head * stride_vg + block.to(tl.int64) * CAP * D
    tl.store(vector_ptr + slot_A[:, None] * D + column_D[None, :], vector_AD)


_find_next, _find_runs, _fill = Launcher(_next_kernel), Launcher(_orbit_kernel), Launcher(_fill_kernel)


def empty_table(x_BGSD: torch.Tensor, cap: int) -> BlockAnchors:
    shape = (*x_BGSD.shape[:2], -(-x_BGSD.shape[2] // BLOCK), cap)
    device = x_BGSD.device
    return BlockAnchors(
        torch.empty((*shape, x_BGSD.shape[3]), dtype=x_BGSD.dtype, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def kernel_summarise(
    x_BGSD: torch.Tensor,
    form: AnchorSettings,
    side: SideSettings,
    table: BlockAnchors,
    place: int,
    first_block: int,
) -> None:
    """Fill the anchor slots of x's blocks, in `table` from block `place` on. x begins at the prompt's block
    `first_block`."""
    batch, kv_heads, rows, dim = x_BGSD.shape
    check_head_dim(dim)
    blocks, levels = -(-rows // BLOCK), 1 if side.relax is None else 2
    lanes = batch * kv_heads * blocks
    next_ZR = torch.empty((levels * lanes, BLOCK), dtype=torch.uint8, device=x_BGSD.device)
    start_ZR = torch.empty_like(next_ZR)
    runs_Z = torch.empty((levels * lanes,), dtype=torch.int32, device=x_BGSD.device)
    loose_cos = form.cos if side.relax is None else form.cos - side.relax
    sizes = (kv_heads, rows, blocks)
    _find_next[(blocks, batch * kv_heads)](
        x_BGSD,
        next_ZR,
        *strides(x_BGSD),
        *sizes,
        form.cos,
        loose_cos,
        lanes * BLOCK,
        D=dim,
        LEVELS=levels,
        CENTRED=form.centred,
        num_warps=4,
        maxnreg=168,
    )
    _find_runs[(cdiv(levels * lanes, 32),)](next_ZR, start_ZR, runs_Z, levels * lanes, Z=32, num_warps=1)
    vector, count = table.vector_BGMAD[:, :, place:], table.count_BGMA[:, :, place:]
    tensors = (x_BGSD, start_ZR, runs_Z, vector, table.first_BGMA[:, :, place:], count)
    _fill[(blocks, batch * kv_heads)](
        *tensors,
        *strides(x_BGSD),
        *strides(vector, count, dims=2),
        *sizes,
        lanes,
        first_block,
        D=dim,
        CAP=side.cap,
        LEVELS=levels,
        num_warps=4,
    )
