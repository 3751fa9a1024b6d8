"""A mixture of experts, token by token in float64. Suffixes as in `kernels.experts`."""

from __future__ import annotations

import math

import torch

from .layers import swiglu


def routed(logits_E: list[float], per_token: int, normed: bool) -> dict[int, float]:
    """Return a token's experts, the most probable first, with their shares."""
    largest = max(logits_E)
    powers = [math.exp(logit - largest) for logit in logits_E]
    best = sorted(range(len(powers)), key=lambda expert: (-powers[expert], expert))[:per_token]
    whole = sum(powers[expert] for expert in best) if normed else sum(powers)
    return {expert: powers[expert] / whole for expert in best}


def mixture(
    x_TC: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_EJC: torch.Tensor,
    down_ECI: torch.Tensor,
    per_token: int,
    normed: bool,
) -> torch.Tensor:
    rows = []
    for x_C, logits_E in zip(x_TC.double(), logits_TE.double().tolist(), strict=True):
        sum_C = torch.zeros_like(x_C)
        for expert, share in routed(logits_E, per_token, normed).items():
            active_1I = swiglu((gate_up_EJC[expert].double() @ x_C)[None])
            sum_C += share * (down_ECI[expert].double() @ active_1I[0])
        rows.append(sum_C)
    return torch.stack(rows)
