"""Convolution and gated delta rule for one row each of many sequences, whose states change in place.

Kernels read the numbers of slots on the device, so that a CUDA graph can capture them.

Shape suffixes are those of `states`, and: G key heads, J = 2 H columns of beta and decay, X = W + 1 weights
of a channel.
"""

import math

import torch
import torch.nn.functional as F

from deltafront.kernels.gated_delta.chunked import unit
from deltafront.kernels.gated_delta.parameters import DeltaParameters, Gates
from deltafront.kernels.gated_delta.states import StepStates
from deltafront.kernels.gated_delta.step_kernels import kernel_step_convolve, kernel_step_delta_rule
from deltafront.kernels.interface import runs_on_cpu


def step(
    x_RE: torch.Tensor, ba_RJ: torch.Tensor, parameters: DeltaParameters, rows: StepStates
) -> torch.Tensor:
    """Return out_RHD of one row for each sequence, and update the states in `rows`.

    Args:
        x_RE: The inputs of the convolution.
    """
    if runs_on_cpu(x_RE, "gated_delta"):
        qkv_RE = cpu_step_convolve(x_RE, parameters, rows)
        return cpu_step_delta_rule(qkv_RE, ba_RJ, parameters, rows)
    qkv_RE = kernel_step_convolve(x_RE, parameters, rows)
    return kernel_step_delta_rule(qkv_RE, ba_RJ, parameters, rows)


def cpu_step_convolve(x_RE: torch.Tensor, parameters: DeltaParameters, rows: StepStates) -> torch.Tensor:
    """Compute the rows of `convolution.convolve`, and move each state on by one row."""
    inputs_RXE = torch.cat([rows.states.conv_SWE[rows.slots_R], x_RE[:, None]], dim=1)
    rows.states.conv_SWE[rows.slots_R] = inputs_RXE[:, 1:]
    sum_RE = (inputs_RXE.float() * parameters.conv_EX.float().T).sum(1)
    return F.silu(sum_RE).to(x_RE.dtype)


def cpu_step_delta_rule(
    qkv_RE: torch.Tensor, ba_RJ: torch.Tensor, parameters: DeltaParameters, rows: StepStates
) -> torch.Tensor:
    """Compute one row of the rule at the head of `chunked` for each sequence."""
    _slots, heads, key_dim, dim = rows.states.recurrent_SHKD.shape
    groups, gates = parameters.key_heads, Gates.of(ba_RJ, parameters)
    keys = groups * key_dim
    q_RE, k_RE, v_RE = torch.split(qkv_RE, [keys, keys, heads * dim], dim=1)
    q_RHK, k_RHK = (
        unit(x.reshape(-1, groups, key_dim)).repeat_interleave(heads // groups, 1) for x in (q_RE, k_RE)
    )
    state_RHKD = rows.states.recurrent_SHKD[rows.slots_R] * gates.decay_TH.exp()[..., None, None]
    held_RHD = (state_RHKD * k_RHK[..., None]).sum(2)
    u_RHD = gates.beta_TH[..., None] * (v_RE.reshape(-1, heads, dim) - held_RHD)
    state_RHKD = state_RHKD + k_RHK[..., None] * u_RHD[:, :, None]
    rows.states.recurrent_SHKD[rows.slots_R] = state_RHKD
    scale = 1 / math.sqrt(key_dim)
    return ((state_RHKD * q_RHK[..., None]).sum(2) * scale).to(qkv_RE.dtype)
