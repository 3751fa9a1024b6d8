"""Packing without looking at the keys: what Delta-KV's similarity is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PeriodicRuns:
    """Every `period`-th row of a chunk leads a run (DeltaAttention, ablation of section 4.1)."""

    period: int

    def __call__(self, k_BGSD: torch.Tensor, first_chunk: int, chunk: int) -> torch.Tensor:
        del first_chunk
        row_S = torch.arange(k_BGSD.shape[2], device=k_BGSD.device)
        return (row_S % chunk % self.period == 0).expand(k_BGSD.shape[:3])


@dataclass(frozen=True)
class RandomRuns:
    """Each row leads a run with probability `share`, the first row of a chunk always.

    The draw depends only on the row's position, the head and the seed, so chunks of a prompt agree.
    """

    share: float
    seed: int = 0

    def __call__(self, k_BGSD: torch.Tensor, first_chunk: int, chunk: int) -> torch.Tensor:
        batch, heads, rows, _ = k_BGSD.shape
        parts = []
        for c in range(rows // chunk):
            generator = torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + first_chunk + c)
            parts.append(torch.rand(batch, heads, chunk, generator=generator) < self.share)
        leads_BGS = torch.cat(parts, dim=2)
        leads_BGS[..., ::chunk] = True
        return leads_BGS.to(k_BGSD.device)
