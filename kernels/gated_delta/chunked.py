"""The gated delta rule over a sequence, in chunks, by torch.

For each row the state S decays by alpha, then replaces a part of the value that it holds for the row's key k:
S becomes alpha S + k uᵀ with u = beta (v - (alpha S)ᵀ k). The row's output is Sᵀ q (Gated DeltaNet, Yang et
al. 2025, arXiv 2412.06464, section 3.1).

Let c_t be the product of the decays from the chunk's start to row t, and S the state before the chunk. The u
of the chunk's rows solve a triangular system (section 3.3: the WY form of DeltaNet, Yang et al. 2024, arXiv
2406.06484, section 3.2, with decays):

    u_t + beta_t sum_{i < t} (c_t / c_i) (k_t · k_i) u_i = beta_t (v_t - c_t Sᵀ k_t)

Shape suffixes are those of `states`, and: T rows, G key heads.
"""

import torch

from deltafront.kernels.gated_delta.parameters import Gates

CHUNK = 64
_EPS = 1e-6
"""Added to the squared length of q and k before dividing by the length."""


def chunked_delta_rule(
    q_TGK: torch.Tensor, k_TGK: torch.Tensor, v_THD: torch.Tensor, gates: Gates, state_HKD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out_THD and the state after the last row, both float32. q and k are normed to length 1 here.

    Args:
        state_HKD: The state before the first row. It stays unchanged.
    """
    group = v_THD.shape[1] // q_TGK.shape[1]
    scale = q_TGK.shape[2] ** -0.5
    q_HTK, k_HTK = (unit(x).repeat_interleave(group, 1).transpose(0, 1) for x in (q_TGK, k_TGK))
    given = (q_HTK * scale, k_HTK, v_THD.float().transpose(0, 1), gates.decay_TH.T, gates.beta_TH.T)
    outs = []
    for begin in range(0, len(v_THD), CHUNK):
        q, k, v, decay, beta = (x[:, begin : begin + CHUNK] for x in given)
        out_HTD, state_HKD = _chunk(q, k, v, decay, beta, state_HKD)
        outs.append(out_HTD)
    return torch.cat(outs, dim=1).transpose(0, 1), state_HKD


def unit(x: torch.Tensor) -> torch.Tensor:
    """Norm the last dimension to length 1, in float32."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()


def _chunk(
    q_HTK: torch.Tensor,
    k_HTK: torch.Tensor,
    v_HTD: torch.Tensor,
    decay_HT: torch.Tensor,
    beta_HT: torch.Tensor,
    state_HKD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    log_HT, beta_HT1 = decay_HT.cumsum(1), beta_HT[..., None]
    between_HTT = (log_HT[:, :, None] - log_HT[:, None]).tril().exp().tril()
    since_start_HT1, to_end_HT1 = log_HT.exp()[..., None], (log_HT[:, -1:] - log_HT).exp()[..., None]
    system_HTT = beta_HT1 * between_HTT * (k_HTK @ k_HTK.mT)
    held_HTD = since_start_HT1 * (k_HTK @ state_HKD)
    u_HTD = torch.linalg.solve_triangular(
        system_HTT, beta_HT1 * (v_HTD - held_HTD), upper=False, unitriangular=True
    )
    out_HTD = since_start_HT1 * (q_HTK @ state_HKD) + (between_HTT * (q_HTK @ k_HTK.mT)) @ u_HTD
    return out_HTD, since_start_HT1[:, -1:] * state_HKD + (to_end_HT1 * k_HTK).mT @ u_HTD
