"""The anchor scan, row by row. Shape suffixes as in `runs.py`; L lanes = batch x heads x chunks."""

from __future__ import annotations

import torch
from torch.nn import functional

from .runs import AnchorRuns, check_scan


def scan(x_BGSD: torch.Tensor, threshold: float, chunk: int = 128, metric: str = "cosine") -> AnchorRuns:
    """Split each chunk of rows into runs (DeltaAttention, section 3.1): `leads`, and what follows from it.

    Raises as `leads`.
    """
    return runs_of(leads(x_BGSD, threshold, chunk, metric), chunk)


def leads(x_BGSD: torch.Tensor, threshold: float, chunk: int = 128, metric: str = "cosine") -> torch.Tensor:
    """is_anchor_BGS, bool: which rows lead a run (DeltaAttention, section 3.1, pre-processing).

    The first row of a chunk is an anchor. A row joins the current run while it is close to the run's
    anchor: cos(anchor, row) >= threshold, or |anchor - row| <= threshold for the Euclidean metric;
    otherwise it becomes the next anchor. A zero vector has cosine 0 with everything. Any number of rows;
    the last chunk may be shorter. Raises KernelInputError for unusable arguments.
    """
    check_scan(x_BGSD, threshold, chunk, metric)
    batch, heads, rows, dim = x_BGSD.shape
    chunks = -(-rows // chunk)
    x_BGSD = functional.pad(x_BGSD.float(), (0, 0, 0, chunks * chunk - rows))
    close_LRR = _closeness(x_BGSD.reshape(-1, chunk, dim), threshold, metric)

    later_RR = torch.ones(chunk, chunk, dtype=torch.bool, device=x_BGSD.device).triu(1)
    ends_LRR = ~close_LRR & later_RR
    next_LR = torch.where(ends_LRR.any(-1), ends_LRR.byte().argmax(-1), chunk)
    table = [[False] * chunk for _ in range(next_LR.shape[0])]
    for led, following in zip(table, next_LR.tolist(), strict=True):
        row = 0
        while row < chunk:
            led[row] = True
            row = following[row]

    leads_LR = torch.tensor(table, device=x_BGSD.device)
    return leads_LR.view(batch, heads, chunks * chunk)[..., :rows]


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
    """Number the runs of each chunk and measure them, from the anchors' places."""
    batch, heads, rows = is_anchor_BGS.shape
    chunks = -(-rows // chunk)
    padded = functional.pad(is_anchor_BGS, (0, chunks * chunk - rows)).view(batch, heads, chunks, chunk)
    run_BGCR = padded.cumsum(-1) - 1
    runs_BGC = run_BGCR[..., -1] + 1
    real_BGCR = torch.arange(chunks * chunk, device=padded.device).view(chunks, chunk) < rows
    ones_BGCR = real_BGCR.expand_as(run_BGCR).long()
    length_BGCR = torch.zeros_like(run_BGCR).scatter_add_(-1, run_BGCR, ones_BGCR)
    start_BGCR = length_BGCR.cumsum(-1) - length_BGCR
    first_BGCR = start_BGCR + torch.arange(chunks, device=padded.device)[:, None] * chunk
    return AnchorRuns(
        is_anchor_BGS=is_anchor_BGS,
        run_BGS=run_BGCR.reshape(batch, heads, -1)[..., :rows].int(),
        runs_BGC=runs_BGC.int(),
        first_BGCR=torch.where(length_BGCR > 0, first_BGCR, 0).int(),
        length_BGCR=length_BGCR.int(),
    )
