"""The anchor scan on whatever device the rows are on."""

from __future__ import annotations

import torch

from . import reference
from .runs import AnchorRuns


def scan(x_BGSD: torch.Tensor, threshold: float, chunk: int = 128, metric: str = "cosine") -> AnchorRuns:
    """See `reference.scan`: the reference on the CPU, the Triton kernel on a GPU."""
    if x_BGSD.is_cuda:
        from . import kernel

        return kernel.scan(x_BGSD, threshold, chunk, metric)
    return reference.scan(x_BGSD, threshold, chunk, metric)


def leads(x_BGSD: torch.Tensor, threshold: float, chunk: int = 128, metric: str = "cosine") -> torch.Tensor:
    """See `reference.leads`: only which rows lead a run, on whatever device."""
    if x_BGSD.is_cuda:
        from . import kernel

        return kernel.leads(x_BGSD, threshold, chunk, metric)
    return reference.leads(x_BGSD, threshold, chunk, metric)
