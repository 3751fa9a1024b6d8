"""Exact causal attention over every key. Suffixes: R rows."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..interface import AttentionInput, Phase, StateSpec, TileMask, runs_on_cpu
from .inputs import QueryRows, causal_tiles, new_output
from .launch import launch

ROWS = 512
"""Rows of a step on the CPU, which sees no more keys than its last row may."""


class DenseExecutor:
    """Takes no mask, and any q_start."""

    def __init__(self, options: object = None) -> None:
        """It takes none."""

    def new_state(self, spec: StateSpec) -> None:
        return None

    def attend(self, x: AttentionInput, mask: TileMask | None, state: None, phase: Phase) -> torch.Tensor:
        with phase("attention"):
            return cpu_attend(x) if runs_on_cpu(x.q_BHTD, "dense") else kernel_attend(x)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: None) -> torch.Tensor:
        return torch.full((), causal_tiles(x), dtype=torch.float64, device=x.q_BHTD.device)


def cpu_attend(x: AttentionInput) -> torch.Tensor:
    """softmax(q k^T * scale) v over all keys at or before each row. Returns q's dtype."""
    return cpu_attend_rows(x, torch.arange(x.q_start, x.q_start + x.q_BHTD.shape[2], device=x.q_BHTD.device))


def cpu_attend_rows(x: AttentionInput, position_R: torch.Tensor) -> torch.Tensor:
    """`cpu_attend` of the rows at the ascending absolute positions position_R: out_BHRD."""
    parts = []
    for position in torch.split(position_R, ROWS):
        end = int(position[-1]) + 1
        seen = torch.arange(end, device=position.device) <= position[:, None]
        part = scaled_dot_product_attention(
            x.q_BHTD[:, :, position - x.q_start].float(),
            x.k_BGSD[:, :, :end].float(),
            x.v_BGSD[:, :, :end].float(),
            attn_mask=seen,
            scale=x.scale,
            enable_gqa=True,
        )
        parts.append(part.to(x.q_BHTD.dtype))
    return torch.cat(parts, dim=2)


def kernel_attend(x: AttentionInput) -> torch.Tensor:
    """`cpu_attend` on the GPU. Scores are float32; weights are rounded to q's type."""
    out_BHTD = new_output(x)
    launch(x, QueryRows(x.q_BHTD, out_BHTD, x.q_start))
    return out_BHTD
