"""GEMMs of linear layers with 16-bit or 32-bit weights: our kernel for large T on Hopper, otherwise torch's.

Shape suffixes: T tokens, I input width, O output width, J = 2 O: the channels of gate, then those of up.
"""

import torch
import torch.nn.functional as F

from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.layers.linear_hopper_launch import fits, launch, takes
from deltafront.kernels.layers.norm import LinearInput
from deltafront.kernels.layers.swiglu import swiglu


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x · weightᵀ + bias.

    Raises:
        KernelInputError: x and weight differ in width, dtype or device.
    """
    _check("linear", x_TI, weight_OI)
    if bias_O is None and _is_ours(x_TI, weight_OI, gated=False):
        return launch(x_TI, weight_OI, gated=False)
    return F.linear(x_TI, weight_OI, bias_O)


def swiglu_linear(
    x_TI: torch.Tensor, weight_JI: torch.Tensor, bias_J: torch.Tensor | None = None
) -> LinearInput:
    """Compute `swiglu` of x · weightᵀ + bias: [T, I] → [T, O].

    Raises:
        KernelInputError: x and weight differ in width, dtype or device, or J is odd.
    """
    _check("swiglu_linear", x_TI, weight_JI)
    if bias_J is None and _is_ours(x_TI, weight_JI, gated=True):
        return launch(x_TI, weight_JI, gated=True)
    return swiglu(F.linear(x_TI, weight_JI, bias_J), fp8=False)


def compile_gemms(weight_OI: torch.Tensor) -> None:
    """Compile our GEMM for weights of this shape and dtype, if it supports them. At run time the number of
    rows decides between our kernel and torch's."""
    if weight_OI.is_cuda and fits(weight_OI):
        for gated in (False, True):
            launch(torch.zeros_like(weight_OI[:1]), weight_OI, gated=gated)


def _is_ours(x_TI: torch.Tensor, weight_OI: torch.Tensor, *, gated: bool) -> bool:
    return x_TI.is_cuda and takes(x_TI, weight_OI, gated=gated)


def _check(name: str, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> None:
    if x_TI.dim() != 2 or weight_OI.dim() != 2 or x_TI.shape[1] != weight_OI.shape[1]:
        raise KernelInputError(
            f"{name}: x is {tuple(x_TI.shape)}, weights are {tuple(weight_OI.shape)}: their widths differ"
        )
    if x_TI.dtype != weight_OI.dtype or x_TI.device != weight_OI.device:
        raise KernelInputError(
            f"{name}: x is {x_TI.dtype} on {x_TI.device}, weights are {weight_OI.dtype} on {weight_OI.device}"
        )
