"""The part of a gated delta network between its input projections and its output projection.

It is a causal convolution with SiLU, the gated delta rule, and a norm gated by z (Gated DeltaNet, Yang
et al. 2025, arXiv 2412.06464, section 3.4).

Shape suffixes are those of `states`, and: T rows, P = E + H D columns of a row's q, k, v and z, J = 2 H
columns of its beta and decay.
"""

import torch

from deltafront.kernels.gated_delta.convolution import convolve
from deltafront.kernels.gated_delta.gated_norm import gated_norm
from deltafront.kernels.gated_delta.parameters import DeltaParameters, Gates
from deltafront.kernels.gated_delta.sequence import sequence_delta_rule
from deltafront.kernels.gated_delta.states import RowStates, StepStates
from deltafront.kernels.gated_delta.step import step
from deltafront.kernels.interface import KernelInputError


def gated_delta(
    qkvz_TP: torch.Tensor, ba_TJ: torch.Tensor, parameters: DeltaParameters, rows: RowStates
) -> torch.Tensor:
    """Compute a layer's rows, and write the states that `rows` names.

    Args:
        qkvz_TP: The heads of q, then those of k, of v and of z.
        ba_TJ: Each value head's beta before its sigmoid, then each one's input of the decay.

    Returns:
        The outputs of all value heads, [T, H D].

    Raises:
        KernelInputError: Shapes or dtypes do not fit together.
        ImportError: flash-linear-attention is needed and not installed (`sequence`).
    """
    _check(qkvz_TP, ba_TJ, parameters, rows)
    channels, heads = len(parameters.conv_EX), len(parameters.decay_H)
    x_TE, z_TO = qkvz_TP[:, :channels], qkvz_TP[:, channels:]
    if isinstance(rows, StepStates):
        out_THD = step(x_TE, ba_TJ, parameters, rows)
    else:
        qkv_TE = convolve(x_TE, parameters.conv_EX, rows)
        out_THD = sequence_delta_rule(qkv_TE, Gates.of(ba_TJ, parameters), rows, parameters.key_heads)
    z_THD = z_TO.view(len(z_TO), heads, -1)
    return gated_norm(out_THD, z_THD, parameters.norm_D, parameters.eps).flatten(1)


def _check(qkvz_TP: torch.Tensor, ba_TJ: torch.Tensor, parameters: DeltaParameters, rows: RowStates) -> None:
    conv_SWE, recurrent_SHKD = rows.states.conv_SWE, rows.states.recurrent_SHKD
    count, (slots, heads, key_dim, dim) = len(qkvz_TP), recurrent_SHKD.shape
    channels, inputs = parameters.conv_EX.shape
    values = heads * dim
    if channels != 2 * parameters.key_heads * key_dim + values or heads % parameters.key_heads:
        raise KernelInputError(
            f"gated_delta: {channels} channels for {parameters.key_heads} key heads of {key_dim} and {heads} "
            f"value heads of {dim}"
        )
    if qkvz_TP.shape[1] != channels + values or ba_TJ.shape != (count, 2 * heads):
        raise KernelInputError(f"gated_delta: rows {tuple(qkvz_TP.shape)} with gates {tuple(ba_TJ.shape)}")
    if conv_SWE.shape != (slots, inputs - 1, channels) or conv_SWE.dtype != qkvz_TP.dtype:
        raise KernelInputError(f"gated_delta: {conv_SWE.dtype} inputs {tuple(conv_SWE.shape)} as a state")
    if recurrent_SHKD.dtype != torch.float32 or not (
        conv_SWE[0].is_contiguous() and recurrent_SHKD[0].is_contiguous()
    ):
        raise KernelInputError("gated_delta: states must be contiguous in a slot, the recurrent one float32")
    if isinstance(rows, StepStates):
        if rows.slots_R.shape != (count,) or rows.slots_R.dtype != torch.int64:
            raise KernelInputError(f"gated_delta: {rows.slots_R.dtype} slots {tuple(rows.slots_R.shape)}")
        return
    ends = [end for end, _slot in rows.cuts]
    if ends != sorted(ends) or not ends or ends[-1] != count:
        raise KernelInputError(f"gated_delta: cuts after {ends} rows of {count}")
