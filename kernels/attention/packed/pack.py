"""Packs each run of similar keys into one key and one value, on the GPU."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from deltafront.kernels.attention.inputs import PackedKeys
from deltafront.kernels.attention.packed.runs import PackedRuns
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.launches import strides

_BLOCK = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=["start_slots", "offset_slots", "packed_slots", "chunks"])
def pack_kernel(
    k_ptr, v_ptr, start_ptr, offset_ptr, packed_k_ptr, packed_v_ptr, weight_ptr,
    stride_kb, stride_kg, stride_ks, stride_vb, stride_vg, stride_vs,
    heads, start_slots, offset_slots, packed_slots, chunks,
    D: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr, MEANS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pack RUNS runs of one KV head. With MEANS, sum a run's rows by tl.dot with a 0/1 matrix [runs, rows].
    Otherwise copy its first row."""
    head = tl.program_id(1).to(tl.int64)
    runs = tl.load(offset_ptr + head * offset_slots + chunks)
    run = tl.program_id(0) * RUNS + tl.arange(0, RUNS)
    valid_run = run < runs
    start = tl.load(start_ptr + head * start_slots + run, mask=valid_run, other=1 << 30)
    stop = tl.load(start_ptr + head * start_slots + run + 1, mask=valid_run, other=0)
    first, end = tl.min(start, 0), tl.max(stop, 0)
    dim = tl.arange(0, D)
    k_base = k_ptr + head // heads * stride_kb + head % heads * stride_kg
    v_base = v_ptr + head // heads * stride_vb + head % heads * stride_vg
    length = tl.where(valid_run, stop - start, 1).to(tl.float32)
    if MEANS:
        k_row = tl.zeros([RUNS, D], tl.float32)
        v_sum = tl.zeros([RUNS, D], tl.float32)
        for begin in range(first, end, ROWS):
            row = begin + tl.arange(0, ROWS)
            member = (row[None, :] >= start[:, None]) & (row[None, :] < stop[:, None])
            valid = (row < end)[:, None]
            row_64 = row.to(tl.int64)[:, None]
            v = tl.load(v_base + row_64 * stride_vs + dim[None, :], mask=valid, other=0.0)
            v_sum = tl.dot(member.to(v.dtype), v, v_sum, input_precision=PRECISION)
            k = tl.load(k_base + row_64 * stride_ks + dim[None, :], mask=valid, other=0.0)
            k_row = tl.dot(member.to(k.dtype), k, k_row, input_precision=PRECISION)
        k_row = k_row / length[:, None]
    else:
        row_64 = start.to(tl.int64)[:, None]
        led = valid_run[:, None]
        k_row = tl.load(k_base + row_64 * stride_ks + dim[None, :], mask=led, other=0.0).to(tl.float32)
        v_row = tl.load(v_base + row_64 * stride_vs + dim[None, :], mask=led, other=0.0).to(tl.float32)
        v_sum = v_row * length[:, None]
    # The attention kernel reads whole tiles, so store zeros after the last run.
    stored = run < tl.cdiv(runs, _BLOCK) * _BLOCK
    place = (head * packed_slots + run)[:, None] * D + dim[None, :]
    tl.store(packed_k_ptr + place, k_row.to(packed_k_ptr.dtype.element_ty), mask=stored[:, None])
    tl.store(packed_v_ptr + place, v_sum.to(packed_v_ptr.dtype.element_ty), mask=stored[:, None])
    tl.store(weight_ptr + head * packed_slots + run, length, mask=stored)


def pack(
    x: AttentionInput, state: PackedRuns, *, chunks: int, chunk: int, critical: int, means: bool
) -> PackedKeys:
    """Pack the runs of the first `chunks` chunks. The tensors have room for one run per row, the maximum."""
    batch, heads, _, dim = x.k_BGSD.shape
    slots = chunks * chunk + BLOCK
    shape, device = (batch, heads, slots), x.k_BGSD.device
    packed = PackedKeys(
        torch.empty(*shape, dim, dtype=x.k_BGSD.dtype, device=device),
        torch.empty(*shape, dim, dtype=x.k_BGSD.dtype, device=device),
        torch.ones(shape, dtype=torch.float32, device=device),
        state.offset_BGC,
        chunk,
        critical,
    )
    if chunks == 0:
        return packed
    places = (state.start_BGP, state.offset_BGC)
    sizes = (heads, places[0].shape[2], places[1].shape[2], slots, chunks)
    pack_kernel[(triton.cdiv(slots, 64), batch * heads)](
        x.k_BGSD,
        x.v_BGSD,
        *places,
        packed.k_BGPD,
        packed.v_BGPD,
        packed.weight_BGP,
        *strides(x.k_BGSD, x.v_BGSD),
        *sizes,
        D=dim,
        RUNS=64,
        ROWS=64,
        MEANS=means,
        PRECISION="ieee" if x.k_BGSD.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
    return packed
