"""Oracles of gated delta networks, token by token in float64. Suffixes are those of `kernels.gated_delta`."""

from __future__ import annotations

import math

import torch


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def convolved(
    x_TE: torch.Tensor, weight_EX: torch.Tensor, before_WE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs, and the inputs that the next row will need."""
    inputs, outs = list(before_WE.double()), []
    for x_E in x_TE.double():
        inputs.append(x_E)
        taps = zip(inputs[-weight_EX.shape[1] :], weight_EX.double().T, strict=True)
        total_E = torch.zeros_like(x_E)
        for input_E, weight_E in taps:
            total_E = total_E + input_E * weight_E
        outs.append(silu(total_E))
    return torch.stack(outs), torch.stack(inputs[len(inputs) - len(before_WE) :])


def gates(
    ba_TJ: torch.Tensor, decay_H: torch.Tensor, bias_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's decay (not its logarithm) and beta."""
    heads = len(decay_H)
    alpha_TH, beta_TH = torch.zeros(len(ba_TJ), heads).double(), torch.zeros(len(ba_TJ), heads).double()
    for t, row in enumerate(ba_TJ.double().tolist()):
        for h in range(heads):
            beta_TH[t, h] = 1 / (1 + math.exp(-row[h]))
            opened = math.log1p(math.exp(row[heads + h] + float(bias_H[h])))
            alpha_TH[t, h] = math.exp(float(decay_H[h]) * opened)
    return alpha_TH, beta_TH


def delta_rule(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_THD: torch.Tensor,
    alpha_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    state_HKD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs, and the state after the last row."""
    out_THD, state_HKD = torch.zeros(v_THD.shape).double(), state_HKD.double().clone()
    group = v_THD.shape[1] // q_TGK.shape[1]
    for t in range(len(v_THD)):
        for h in range(v_THD.shape[1]):
            q_K, k_K = (unit(x[t, h // group].double()) for x in (q_TGK, k_TGK))
            state_KD = float(alpha_TH[t, h]) * state_HKD[h]
            missing_D = v_THD[t, h].double() - k_K @ state_KD
            state_HKD[h] = state_KD + float(beta_TH[t, h]) * torch.outer(k_K, missing_D)
            out_THD[t, h] = q_K @ state_HKD[h] / math.sqrt(len(q_K))
    return out_THD, state_HKD


def unit(x_K: torch.Tensor) -> torch.Tensor:
    return x_K / math.sqrt(float(x_K @ x_K) + 1e-6)


def gated_normed(
    x_THD: torch.Tensor, z_THD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    out_THD = torch.zeros(x_THD.shape).double()
    for t, x_HD in enumerate(x_THD.double()):
        for h, x_D in enumerate(x_HD):
            normed_D = x_D / math.sqrt(float(x_D @ x_D) / len(x_D) + eps) * weight_D.double()
            out_THD[t, h] = normed_D * silu(z_THD[t, h].double())
    return out_THD
