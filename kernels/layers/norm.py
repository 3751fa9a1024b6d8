"""RMSNorm of the residual stream, which takes in what the block before added to it.

Shape suffixes: T tokens, C hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..interface import KernelInputError, runs_on_cpu
from .fp8 import Fp8Rows, cpu_quantise_rows
from .rows import check_rows

LinearInput = torch.Tensor | Fp8Rows
"""What a linear layer takes: 16 or 32 bits, or quantised."""


def add_norm(
    hidden_TC: torch.Tensor, update_TC: torch.Tensor | None, weight_C: torch.Tensor, eps: float, fp8: bool
) -> tuple[torch.Tensor, LinearInput]:
    """hidden + update, and its RMSNorm (Zhang and Sennrich 2019, equation 4) times the weight.

    The sum is rounded to hidden's dtype before it is normed, in float32; without an update it is hidden
    itself. fp8: the norm as rows of e4m3. Neither argument is written to. Raises KernelInputError for
    shapes or dtypes that differ.
    """
    given = {"hidden": hidden_TC} if update_TC is None else {"hidden": hidden_TC, "update": update_TC}
    check_rows("add_norm", **given)
    if weight_C.shape != hidden_TC.shape[1:]:
        raise KernelInputError(f"add_norm: weight {tuple(weight_C.shape)} of {hidden_TC.shape[1]} channels")
    if runs_on_cpu(hidden_TC, "add_norm"):
        return cpu_add_norm(hidden_TC, update_TC, weight_C, eps, fp8)
    from .norm_kernel import kernel_add_norm

    return kernel_add_norm(hidden_TC, update_TC, weight_C, eps, fp8)


def cpu_add_norm(
    hidden_TC: torch.Tensor, update_TC: torch.Tensor | None, weight_C: torch.Tensor, eps: float, fp8: bool
) -> tuple[torch.Tensor, LinearInput]:
    sum_TC = hidden_TC if update_TC is None else hidden_TC + update_TC
    if not fp8:
        return sum_TC, F.rms_norm(sum_TC, weight_C.shape, weight_C, eps)
    return sum_TC, cpu_quantise_rows(F.rms_norm(sum_TC.float(), weight_C.shape, weight_C.float(), eps))
