"""The product of a few rows with a weight matrix, as a decode step takes it: bound by reading the weights.

Every row is computed as if it were alone, whatever stands beside it. Shape suffixes: T rows, I input width,
O output width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..interface import KernelInputError
from .device import check_rows, runs_on_cpu
from .fp8 import Fp8Rows

MOST_ROWS = 16


def product_of_few(
    x_TI: torch.Tensor, weight: torch.Tensor | Fp8Rows, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """x · weightᵀ + bias in x's dtype, summed in float32. Weights of e4m3 are read as such and multiplied
    with x as it is.

    Raises KernelInputError for more than MOST_ROWS rows and for shapes or dtypes that do not fit.
    """
    weight_OI = weight.values_TI if isinstance(weight, Fp8Rows) else weight
    check_rows("product_of_few", x=x_TI)
    if x_TI.shape[0] > MOST_ROWS or x_TI.shape[1] != weight_OI.shape[1]:
        raise KernelInputError(
            f"product_of_few: {tuple(x_TI.shape)} with weights {tuple(weight_OI.shape)}: at most {MOST_ROWS} "
            "rows, as wide as the weights"
        )
    if not isinstance(weight, Fp8Rows) and weight.dtype != x_TI.dtype:
        raise KernelInputError(f"product_of_few: {x_TI.dtype} with weights of {weight.dtype}")
    if runs_on_cpu(x_TI, "product_of_few"):
        return cpu_product_of_few(x_TI, weight, bias_O)
    from .few_rows_kernel import kernel_product_of_few

    return kernel_product_of_few(x_TI, weight, bias_O)


def cpu_product_of_few(
    x_TI: torch.Tensor, weight: torch.Tensor | Fp8Rows, bias_O: torch.Tensor | None
) -> torch.Tensor:
    wide_OI = weight.dequantised(torch.float32) if isinstance(weight, Fp8Rows) else weight.float()
    bias = None if bias_O is None else bias_O.float()
    return F.linear(x_TI.float(), wide_OI, bias).to(x_TI.dtype)
