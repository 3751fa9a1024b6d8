"""The anchor scan on the GPU. Shape suffixes as in `anchor_scan.py`.

One program per chunk takes its rows BLOCK at a time. Their Gram matrix comes from the tensor cores;
`next[i]` is the first later row that is far from row i, and the anchors are the orbit of the first row that
is far from the anchor carried over from the rows before.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .anchor_scan import check_scan
from .constants import BLOCK
from .interface import KernelInputError

_BLOCK = tl.constexpr(BLOCK)
_COSINE = tl.constexpr(0)
_EUCLIDEAN = tl.constexpr(1)
_METRICS = {"cosine": _COSINE.value, "euclidean": _EUCLIDEAN.value}


@triton.jit
def is_close(dot, square_a, square_b, threshold, METRIC: tl.constexpr):
    """Whether two rows are close, from their dot product and squared lengths; a zero row has cosine 0."""
    if METRIC == _EUCLIDEAN:
        close = square_a + square_b - 2.0 * dot <= threshold * threshold
    else:
        lengths = tl.sqrt_rn(square_a) * tl.sqrt_rn(square_b)
        close = tl.where(lengths > 0.0, dot >= threshold * lengths, threshold <= 0.0)
    return close


@triton.jit
def next_far(x_RD, square_R, rows, threshold, METRIC: tl.constexpr):
    """For each of BLOCK rows the first later row, of the first `rows`, that is far from it; BLOCK if none."""
    row_R = tl.arange(0, _BLOCK)
    dot_RR = tl.dot(x_RD, tl.trans(x_RD), input_precision="ieee")
    close_RR = is_close(dot_RR, square_R[:, None], square_R[None, :], threshold, METRIC)
    ends_RR = (row_R[None, :] > row_R[:, None]) & (row_R[None, :] < rows) & (close_RR == 0)
    return tl.min(tl.where(ends_RR, row_R[None, :], _BLOCK), axis=1)


@triton.jit
def orbit(next_R, start):
    """The rows reached from row `start` (none if it is BLOCK) by following `next`."""
    row_R = tl.arange(0, _BLOCK)
    is_anchor_R = tl.zeros((_BLOCK,), tl.int32)
    current = start
    while current < _BLOCK:
        current_R = row_R == current
        is_anchor_R = tl.where(current_R, 1, is_anchor_R)
        current = tl.sum(tl.where(current_R, next_R, 0), axis=0)
    return is_anchor_R


@triton.jit(do_not_specialize=["rows"])
def _scan_kernel(
    x_ptr,
    anchor_ptr,
    stride_xb,
    stride_xg,
    stride_xs,
    heads,
    rows,
    threshold,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    METRIC: tl.constexpr,
):
    chunk = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    x_ptr += lane // heads * stride_xb + lane % heads * stride_xg
    anchor_ptr += lane * rows
    row_R = tl.arange(0, _BLOCK)
    column_D = tl.arange(0, D)
    anchor = chunk * CHUNK  # absolute row of the run's anchor so far
    for part in range(CHUNK // _BLOCK):
        start = chunk * CHUNK + part * _BLOCK
        valid_R = start + row_R < rows
        x_RD = tl.load(
            x_ptr + (start + row_R[:, None]).to(tl.int64) * stride_xs + column_D[None, :],
            mask=valid_R[:, None],
            other=0.0,
        )
        wide_RD = x_RD.to(tl.float32)
        square_R = tl.sum(wide_RD * wide_RD, axis=1)
        anchor_D = tl.load(x_ptr + anchor.to(tl.int64) * stride_xs + column_D).to(tl.float32)
        dot_R = tl.sum(wide_RD * anchor_D[None, :], axis=1)
        close_R = is_close(dot_R, square_R, tl.sum(anchor_D * anchor_D, axis=0), threshold, METRIC)
        opens_R = ((close_R == 0) | (start + row_R == chunk * CHUNK)) & valid_R
        entry = tl.min(tl.where(opens_R, row_R, _BLOCK), axis=0)
        is_anchor_R = orbit(next_far(x_RD, square_R, rows - start, threshold, METRIC), entry)
        last = tl.max(tl.where(is_anchor_R > 0, row_R, -1), axis=0)
        anchor = tl.where(last >= 0, start + last, anchor)
        tl.store(anchor_ptr + start + row_R, is_anchor_R.to(tl.int8), mask=valid_R)


def kernel_find_anchors(
    x_BGSD: torch.Tensor, threshold: float, chunk: int = BLOCK, metric: str = "cosine"
) -> torch.Tensor:
    """See `anchor_scan.find_anchors`."""
    check_scan(x_BGSD, threshold, chunk, metric)
    batch, heads, rows, dim = x_BGSD.shape
    check_head_dim(dim)
    is_anchor_BGS = torch.empty((batch, heads, rows), dtype=torch.int8, device=x_BGSD.device)
    _scan_kernel[(-(-rows // chunk), batch * heads)](
        x_BGSD,
        is_anchor_BGS,
        x_BGSD.stride(0),
        x_BGSD.stride(1),
        x_BGSD.stride(2),
        heads,
        rows,
        threshold,
        CHUNK=chunk,
        D=dim,
        METRIC=_METRICS[metric],
        num_warps=4,
    )
    return is_anchor_BGS.view(torch.bool)


def check_head_dim(dim: int) -> None:
    """Triton tiles have power-of-two sides, and a dot at least 16 columns."""
    if dim < 16 or dim > 256 or dim & (dim - 1):
        raise KernelInputError(f"head dimension {dim} is not a power of two within 16 .. 256")


_SCAN = {
    "x_ptr": "*bf16",
    "anchor_ptr": "*i8",
    "threshold": "fp32",
    "heads": "i32",
    "rows": "i32",
    **dict.fromkeys(("stride_xb", "stride_xg", "stride_xs"), "i64"),
}

COMPILE_CASES = [
    (_scan_kernel, _SCAN, {"CHUNK": BLOCK, "D": 64, "METRIC": _METRICS["euclidean"]}),
    (_scan_kernel, _SCAN, {"CHUNK": 512, "D": 128, "METRIC": _METRICS["cosine"]}),
]
"""What tests/kernels compiles for sm_90: function, types of its arguments, constants."""
