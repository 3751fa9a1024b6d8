"""Oracle of a mixture of experts, token by token in float64. Suffixes are those of `kernels.experts`."""

from __future__ import annotations

import math

import torch

from deltafront.kernels.experts.gemm import PLAIN, ExpertOptions
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


def clamped_swiglu(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up_TJ.chunk(2, dim=1)
    gate, up = torch.minimum(gate, gate.new_tensor(7.0)), torch.clip(up, -7.0, 7.0)
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


def mixture(
    x_TC: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_EJC: torch.Tensor,
    down_ECI: torch.Tensor,
    router: Router,
    options: ExpertOptions = PLAIN,
) -> torch.Tensor:
    rows, experts = [], len(gate_up_EJC)
    gate_up_bias, down_bias = (
        torch.zeros(experts, 1, dtype=torch.float64)
        if bias is None
        else bias.cpu().double().view(experts, -1)
        for bias in (options.gate_up_bias, options.down_bias)
    )
    activate = clamped_swiglu if options.clamped else swiglu
    for x_C, logits_E in zip(x_TC.double(), logits_TE.double().tolist(), strict=True):
        sum_C = torch.zeros_like(x_C)
        for expert, share in routed(logits_E, router).items():
            active_1I = activate((gate_up_EJC[expert].double() @ x_C + gate_up_bias[expert])[None])
            sum_C += share * (down_ECI[expert].double() @ active_1I[0] + down_bias[expert])
        rows.append(sum_C)
    return torch.stack(rows)
