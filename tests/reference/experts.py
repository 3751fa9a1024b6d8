"""Oracle of a mixture of experts, token by token in float64. Suffixes are those of `kernels.experts`."""

from __future__ import annotations

import math

import torch

from deltafront.kernels.experts.routing import Router

from .layers import swiglu


def routed(logits_E: list[float], router: Router) -> dict[int, float]:
    """Return a token's experts with their routing weights, the best first."""
    if router.bias_E is None:
        largest = max(logits_E)
        powers = [math.exp(logit - largest) for logit in logits_E]
        shares = [power / sum(powers) for power in powers]
        wanted = logits_E
    else:
        shares = [1.0 / (1.0 + math.exp(-logit)) for logit in logits_E]
        wanted = [share + bias for share, bias in zip(shares, router.bias_E.tolist(), strict=True)]
    size = len(logits_E) // router.groups
    groups = [range(first, first + size) for first in range(0, len(logits_E), size)]
    if router.groups > 1:
        groups.sort(key=lambda group: (-sum(sorted(wanted[e] for e in group)[-2:]), group.start))
        groups = groups[: router.chosen_groups]
    allowed = [expert for group in groups for expert in group]
    best = sorted(allowed, key=lambda expert: (-wanted[expert], expert))[: router.per_token]
    whole = sum(shares[expert] for expert in best) if router.normed else 1.0
    return {expert: shares[expert] / whole * router.scale for expert in best}


def mixture(
    x_TC: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_EJC: torch.Tensor,
    down_ECI: torch.Tensor,
    router: Router,
) -> torch.Tensor:
    rows = []
    for x_C, logits_E in zip(x_TC.double(), logits_TE.double().tolist(), strict=True):
        sum_C = torch.zeros_like(x_C)
        for expert, share in routed(logits_E, router).items():
            active_1I = swiglu((gate_up_EJC[expert].double() @ x_C)[None])
            sum_C += share * (down_ECI[expert].double() @ active_1I[0])
        rows.append(sum_C)
    return torch.stack(rows)
