"""The gated delta rule over the rows of a sequence, with a state written at each cut.

On a GPU the library flash-linear-attention computes rows of 16 bits. It would multiply float32 rows in TF32,
so `chunked` computes those.

Shape suffixes are those of `states`, and: T rows, G key heads.
"""

import torch

from deltafront.kernels.gated_delta.chunked import chunked_delta_rule
from deltafront.kernels.gated_delta.parameters import Gates
from deltafront.kernels.gated_delta.states import SequenceStates
from deltafront.kernels.interface import runs_on_cpu


def sequence_delta_rule(
    qkv_TE: torch.Tensor, gates: Gates, rows: SequenceStates, key_heads: int
) -> torch.Tensor:
    """Return out_THD in the dtype of the rows, and write the recurrent states of all cuts.

    Args:
        qkv_TE: The convolution's outputs: the heads of q, then of k and of v.

    Raises:
        ImportError: flash-linear-attention is needed and not installed.
    """
    recurrent_SHKD, begin = rows.states.recurrent_SHKD, 0
    _slots, heads, key_dim, dim = recurrent_SHKD.shape
    keys = key_heads * key_dim
    q_TE, k_TE, v_TE = torch.split(qkv_TE, [keys, keys, heads * dim], dim=1)
    q_TGK, k_TGK = (x.view(-1, key_heads, key_dim) for x in (q_TE, k_TE))
    v_THD, state_HKD = v_TE.view(-1, heads, dim), recurrent_SHKD[rows.first]
    out_THD = torch.empty(v_THD.shape, dtype=v_THD.dtype, device=v_THD.device)
    for end, slot in rows.cuts:
        if end > begin:
            part = slice(begin, end)
            own = Gates(gates.decay_TH[part], gates.beta_TH[part])
            rule = chunked_delta_rule if _in_torch(v_THD) else library_delta_rule
            out_RHD, state_HKD = rule(q_TGK[part], k_TGK[part], v_THD[part], own, state_HKD)
            out_THD[part] = out_RHD
        recurrent_SHKD[slot] = state_HKD
        begin = end
    return out_THD


def _in_torch(x: torch.Tensor) -> bool:
    return runs_on_cpu(x, "gated_delta") or x.dtype == torch.float32


def library_delta_rule(
    q_TGK: torch.Tensor, k_TGK: torch.Tensor, v_THD: torch.Tensor, gates: Gates, state_HKD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `chunked_delta_rule` by flash-linear-attention, with out_THD in v's dtype."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # takes seconds, and needs a GPU
    except ImportError as error:
        raise ImportError(
            "linear attention on a GPU needs flash-linear-attention, which cannot be imported "
            f"({error}): pip install flash-linear-attention"
        ) from error
    out_1THD, state_1HKD = chunk_gated_delta_rule(
        q_TGK[None],
        k_TGK[None],
        v_THD[None],
        gates.decay_TH[None],
        gates.beta_TH[None],
        initial_state=state_HKD[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out_1THD[0], state_1HKD[0]
