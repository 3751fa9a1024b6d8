"""The anchor scan: runs of similar rows, each led by its anchor. Row by row on the CPU, in Triton on a GPU.

Shape suffixes: B batch, G heads, S rows, D head dimension, C chunks (S / chunk, rounded up), R rows
of a chunk; L lanes = batch x heads x chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from .constants import BLOCK
from .interface import KernelInputError

METRICS = ("cosine", "euclidean")


@dataclass(frozen=True)
class AnchorRuns:
    """Runs of consecutive rows that are close to the run's first row, its anchor.

    is_anchor_BGS: bool, whether the row leads a run. run_BGS: int32, the row's run within its chunk,
    from 0. runs_BGC: int32, runs in each chunk.
    """

    is_anchor_BGS: torch.Tensor
    run_BGS: torch.Tensor
    runs_BGC: torch.Tensor


def check_scan(x_BGSD: torch.Tensor, threshold: float, chunk: int, metric: str) -> None:
    """Raise KernelInputError for anything the scan cannot work with."""
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
    if metric not in METRICS:
        raise KernelInputError(f"metric {metric!r} is not one of {METRICS}")
    if math.isnan(threshold) or (metric == "euclidean" and threshold < 0):
        raise KernelInputError(f"threshold {threshold} is not usable with the {metric} metric")


def find_anchors(
    x_BGSD: torch.Tensor, threshold: float, chunk: int = BLOCK, metric: str = "cosine"
) -> torch.Tensor:
    """is_anchor_BGS, bool: which rows lead a run (DeltaAttention, section 3.1, pre-processing).

    The first row of a chunk is an anchor. A row joins the current run while it is close to the run's
    anchor: cos(anchor, row) >= threshold, or |anchor - row| <= threshold for the Euclidean metric;
    otherwise it becomes the next anchor. A zero vector has cosine 0 with everything. Any number of rows;
    the last chunk may be shorter. Raises KernelInputError for unusable arguments.
    """
    if x_BGSD.is_cuda:
        from .anchor_scan_kernel import kernel_find_anchors

        return kernel_find_anchors(x_BGSD, threshold, chunk, metric)
    return cpu_find_anchors(x_BGSD, threshold, chunk, metric)


def cpu_scan(
    x_BGSD: torch.Tensor, threshold: float, chunk: int = BLOCK, metric: str = "cosine"
) -> AnchorRuns:
    """Split each chunk of rows into runs: `cpu_find_anchors`, and what follows from it."""
    return runs_of(cpu_find_anchors(x_BGSD, threshold, chunk, metric), chunk)


def cpu_find_anchors(
    x_BGSD: torch.Tensor, threshold: float, chunk: int = BLOCK, metric: str = "cosine"
) -> torch.Tensor:
    """See `find_anchors`; on any device."""
    check_scan(x_BGSD, threshold, chunk, metric)
    batch, heads, rows, dim = x_BGSD.shape
    chunks = -(-rows // chunk)
    x_BGSD = functional.pad(x_BGSD.float(), (0, 0, 0, chunks * chunk - rows))
    close_LRR = _closeness(x_BGSD.reshape(-1, chunk, dim), threshold, metric)

    later_RR = torch.ones(chunk, chunk, dtype=torch.bool, device=x_BGSD.device).triu(1)
    ends_LRR = ~close_LRR & later_RR
    next_LR = torch.where(ends_LRR.any(-1), ends_LRR.byte().argmax(-1), chunk)
    anchors = [[False] * chunk for _ in range(next_LR.shape[0])]
    for is_anchor, next_row in zip(anchors, next_LR.tolist(), strict=True):
        row = 0
        while row < chunk:
            is_anchor[row] = True
            row = next_row[row]

    is_anchor_LR = torch.tensor(anchors, device=x_BGSD.device)
    return is_anchor_LR.view(batch, heads, chunks * chunk)[..., :rows]


def _closeness(x_LRD: torch.Tensor, threshold: float, metric: str) -> torch.Tensor:
    """bool (L, R, R): whether row j would join a run led by row i."""
    dot_LRR = x_LRD @ x_LRD.transpose(1, 2)
    square_LR = x_LRD.square().sum(-1)
    if metric == "euclidean":
        distance_LRR = square_LR[:, :, None] + square_LR[:, None, :] - 2 * dot_LRR
        return distance_LRR <= threshold * threshold
    norm_LR = square_LR.sqrt()
    norms_LRR = norm_LR[:, :, None] * norm_LR[:, None, :]
    return torch.where(norms_LRR > 0, dot_LRR >= threshold * norms_LRR, threshold <= 0)


def runs_of(is_anchor_BGS: torch.Tensor, chunk: int) -> AnchorRuns:
    """Number the runs of each chunk, from the anchors' places."""
    batch, heads, rows = is_anchor_BGS.shape
    chunks = -(-rows // chunk)
    padded = functional.pad(is_anchor_BGS, (0, chunks * chunk - rows)).view(batch, heads, chunks, chunk)
    run_BGCR = padded.cumsum(-1) - 1
    run_BGS = run_BGCR.reshape(batch, heads, -1)[..., :rows].int()
    return AnchorRuns(is_anchor_BGS, run_BGS, (run_BGCR[..., -1] + 1).int())
