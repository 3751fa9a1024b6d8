"""The activation between a feed-forward network's products. Shape suffixes: T tokens, I intermediate size."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..interface import KernelInputError, runs_on_cpu
from .fp8 import Fp8Rows, cpu_quantise_rows
from .norm import LinearInput
from .rows import check_rows


def swiglu(gate_up_TJ: torch.Tensor, fp8: bool) -> LinearInput:
    """SiLU(gate) · up (Shazeer 2020, equation 6) of a row's two halves: [T, 2 I] → [T, I].

    fp8: as rows of e4m3. Raises KernelInputError unless the rows are contiguous and even.
    """
    check_rows("swiglu", gate_up=gate_up_TJ)
    if gate_up_TJ.shape[1] % 2:
        raise KernelInputError(f"swiglu: rows of {gate_up_TJ.shape[1]} have no halves")
    if runs_on_cpu(gate_up_TJ, "swiglu"):
        return cpu_swiglu(gate_up_TJ, fp8)
    from .swiglu_kernel import kernel_swiglu

    return kernel_swiglu(gate_up_TJ, fp8)


def cpu_swiglu(gate_up_TJ: torch.Tensor, fp8: bool) -> torch.Tensor | Fp8Rows:
    gate_TI, up_TI = (gate_up_TJ.float() if fp8 else gate_up_TJ).chunk(2, dim=-1)
    active_TI = F.silu(gate_TI) * up_TI
    return cpu_quantise_rows(active_TI) if fp8 else active_TI
