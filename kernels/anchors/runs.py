"""What the anchor scan returns, and what it accepts.

Shape suffixes: B batch, G heads, S rows, D head dimension, C chunks (S / chunk, rounded up), R runs of a
chunk (as many slots as the chunk has rows).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..interface import BLOCK, KernelInputError

METRICS = ("cosine", "euclidean")


@dataclass(frozen=True)
class AnchorRuns:
    """Runs of consecutive rows that are close to the run's first row, its anchor.

    is_anchor_BGS: bool, whether the row leads a run. run_BGS: int32, the row's run within its chunk,
    from 0. runs_BGC: int32, runs in each chunk. first_BGCR: int32, absolute position of each run's anchor.
    length_BGCR: int32, rows in each run, at least 1. Entries r >= runs_BGC are 0 in both.
    """

    is_anchor_BGS: torch.Tensor
    run_BGS: torch.Tensor
    runs_BGC: torch.Tensor
    first_BGCR: torch.Tensor
    length_BGCR: torch.Tensor

    @property
    def last_BGCR(self) -> torch.Tensor:
        """int32, absolute position of each run's last row; -1 in slots without a run."""
        return self.first_BGCR + self.length_BGCR - 1


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
