"""Groups similar consecutive rows into runs. The first row of a run is its anchor (DeltaAttention, section
4.1.1).

Shape suffixes: B batch, G heads, S rows, D head dimension, C chunks (S / chunk, rounded up), R rows of a
chunk, L lanes = batch x heads x chunks.

From a block's Gram matrix the kernel computes `next[i]`, the first later row that is not close to row i. Then
it follows `next` from anchor to anchor.

With a key bias (Qwen2) any two keys have a cosine near 1. A vector added to all keys does not change the
softmax, so `less_mean` first subtracts the mean of the chunk's keys.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import KernelInputError

ROUNDING = 1e-6
"""A row equals its chunk's mean if their squared distance is at most this share of the mean squared norm."""


@dataclass(frozen=True)
class AnchorRuns:
    """The result of an anchor scan. Each chunk of rows is split into runs: an anchor row and the similar rows
    after it.

    Attributes:
        is_anchor_BGS: bool.
        run_BGS: int32, a row's run within its chunk, from 0.
        runs_BGC: int32, a chunk's number of runs.
    """

    is_anchor_BGS: torch.Tensor
    run_BGS: torch.Tensor
    runs_BGC: torch.Tensor


def check_scan(x_BGSD: torch.Tensor, cos: float, chunk: int) -> None:
    if x_BGSD.dim() != 4 or x_BGSD.numel() == 0:
        raise KernelInputError(
            f"x must be (batch, heads, rows, D) and not empty, its shape is {tuple(x_BGSD.shape)}"
        )
    if x_BGSD.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise KernelInputError(f"x: dtype {x_BGSD.dtype} is not float32, float16 or bfloat16")
    if x_BGSD.stride(3) != 1:
        raise KernelInputError(f"x: the head dimension must be contiguous, stride is {x_BGSD.stride(3)}")
    if chunk <= 0 or chunk % BLOCK:
        raise KernelInputError(f"chunk {chunk} is not a positive multiple of {BLOCK}")
    if math.isnan(cos):
        raise KernelInputError(f"cos must be a number, got {cos}")


def find_anchors(x_BGSD: torch.Tensor, cos: float, chunk: int = BLOCK) -> torch.Tensor:
    """Find the rows that are anchors.

    A chunk's first row is an anchor. A row that is close to the current run's anchor joins the run. Any other
    row is the next anchor. A zero vector has cosine 0 with everything.

    Args:
        cos: Two rows are close if their cosine is at least this.
        chunk: A multiple of BLOCK.

    Returns:
        is_anchor_BGS, bool.

    Raises:
        KernelInputError: Shapes, types or numbers do not fit.
    """
    if x_BGSD.is_cuda:
        return kernel_find_anchors(x_BGSD, cos, chunk)
    return cpu_find_anchors(x_BGSD, cos, chunk)


def less_mean(x_BGSD: torch.Tensor, chunk: int) -> torch.Tensor:
    """Subtract each chunk's mean row, in float32. Differences that are only rounding become 0."""
    batch, heads, rows, dim = x_BGSD.shape
    chunks = -(-rows // chunk)
    wide_BGCRD = functional.pad(x_BGSD.float(), (0, 0, 0, chunks * chunk - rows)).view(
        batch, heads, chunks, chunk, dim
    )
    start_C = torch.arange(chunks, device=x_BGSD.device) * chunk
    rows_C11 = torch.clamp(rows - start_C, max=chunk)[:, None, None].float()
    apart_BGCRD = wide_BGCRD - wide_BGCRD.sum(3, keepdim=True) / rows_C11
    square_BGCR1 = apart_BGCRD.square().sum(-1, keepdim=True)
    least_BGC11 = ROUNDING * wide_BGCRD.square().sum((3, 4), keepdim=True) / rows_C11
    apart_BGCRD = torch.where(square_BGCR1 > least_BGC11, apart_BGCRD, 0.0)
    return apart_BGCRD.view(batch, heads, -1, dim)[:, :, :rows]


def cpu_scan(x_BGSD: torch.Tensor, cos: float, chunk: int = BLOCK, *, centred: bool = False) -> AnchorRuns:
    x_BGSD = less_mean(x_BGSD, chunk) if centred else x_BGSD
    return runs_of(cpu_find_anchors(x_BGSD, cos, chunk), chunk)


def cpu_find_anchors(x_BGSD: torch.Tensor, cos: float, chunk: int = BLOCK) -> torch.Tensor:
    """Compute `find_anchors` in torch, on any device."""
    check_scan(x_BGSD, cos, chunk)
    batch, heads, rows, dim = x_BGSD.shape
    chunks = -(-rows // chunk)
    x_BGSD = functional.pad(x_BGSD.float(), (0, 0, 0, chunks * chunk - rows))
    close_LRR = _closeness(x_BGSD.reshape(-1, chunk, dim), cos)
    return leaders(close_LRR).view(batch, heads, chunks * chunk)[..., :rows]


def leaders(close_LRR: torch.Tensor) -> torch.Tensor:
    """Find each chunk's anchors, given which pairs of its rows are close. Return is_anchor_LR."""
    chunk = close_LRR.shape[-1]
    later_RR = torch.ones(chunk, chunk, dtype=torch.bool, device=close_LRR.device).triu(1)
    ends_LRR = ~close_LRR & later_RR
    next_LR = torch.where(ends_LRR.any(-1), ends_LRR.byte().argmax(-1), chunk)
    anchors = [[False] * chunk for _ in range(next_LR.shape[0])]
    for is_anchor, next_row in zip(anchors, next_LR.tolist(), strict=True):
        row = 0
        while row < chunk:
            is_anchor[row] = True
            row = next_row[row]
    return torch.tensor(anchors, device=close_LRR.device)


def _closeness(x_LRD: torch.Tensor, cos: float) -> torch.Tensor:
    norm_LR = x_LRD.square().sum(-1).sqrt()
    norms_LRR = norm_LR[:, :, None] * norm_LR[:, None, :]
    return torch.where(norms_LRR > 0, x_LRD @ x_LRD.transpose(1, 2) >= cos * norms_LRR, cos <= 0)


def runs_of(is_anchor_BGS: torch.Tensor, chunk: int) -> AnchorRuns:
    batch, heads, rows = is_anchor_BGS.shape
    chunks = -(-rows // chunk)
    padded = functional.pad(is_anchor_BGS, (0, chunks * chunk - rows)).view(batch, heads, chunks, chunk)
    run_BGCR = padded.cumsum(-1) - 1
    run_BGS = run_BGCR.reshape(batch, heads, -1)[..., :rows].int()
    return AnchorRuns(is_anchor_BGS, run_BGS, (run_BGCR[..., -1] + 1).int())


_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def is_close(dot, square_a, square_b, cos):
    """Say whether the cosine of two rows is at least `cos`. A zero row has cosine 0."""
    lengths = tl.sqrt_rn(square_a) * tl.sqrt_rn(square_b)
    return tl.where(lengths > 0.0, dot >= cos * lengths, cos <= 0.0)


@triton.jit
def next_far(x_RD, square_R, rows, cos):
    """Find, for each of the block's `rows` rows, the first later row that is not close to it, or BLOCK."""
    row_R = tl.arange(0, _BLOCK)
    dot_RR = tl.dot(x_RD, tl.trans(x_RD), input_precision="ieee")
    close_RR = is_close(dot_RR, square_R[:, None], square_R[None, :], cos)
    ends_RR = (row_R[None, :] > row_R[:, None]) & (row_R[None, :] < rows) & (close_RR == 0)
    return tl.min(tl.where(ends_RR, row_R[None, :], _BLOCK), axis=1)


@triton.jit
def orbit(next_R, start):
    """Mark the rows reached from row `start` by following `next`. A `start` of BLOCK marks none."""
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
    x_ptr, anchor_ptr, stride_xb, stride_xg, stride_xs, heads, rows, cos,
    CHUNK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
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
        close_R = is_close(dot_R, square_R, tl.sum(anchor_D * anchor_D, axis=0), cos)
        opens_R = ((close_R == 0) | (start + row_R == chunk * CHUNK)) & valid_R
        entry = tl.min(tl.where(opens_R, row_R, _BLOCK), axis=0)
        is_anchor_R = orbit(next_far(x_RD, square_R, rows - start, cos), entry)
        last = tl.max(tl.where(is_anchor_R > 0, row_R, -1), axis=0)
        anchor = tl.where(last >= 0, start + last, anchor)
        tl.store(anchor_ptr + start + row_R, is_anchor_R.to(tl.int8), mask=valid_R)


def kernel_find_anchors(x_BGSD: torch.Tensor, cos: float, chunk: int = BLOCK) -> torch.Tensor:
    check_scan(x_BGSD, cos, chunk)
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
        cos,
        CHUNK=chunk,
        D=dim,
        num_warps=4,
    )
    return is_anchor_BGS.view(torch.bool)


def check_head_dim(dim: int) -> None:
    """Check the head dimension: Triton's tiles have power-of-two sides, and a dot needs 16 columns."""
    if dim < 16 or dim > 256 or dim & (dim - 1):
        raise KernelInputError(f"head dimension {dim} is not a power of two within 16 .. 256")
