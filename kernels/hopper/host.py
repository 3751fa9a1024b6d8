"""Device properties and TMA descriptors for launches of Hopper kernels."""

from collections.abc import Sequence
from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@cache
def is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class TileDescriptor(TensorDescriptor):  # type: ignore[misc]  # untyped
    """A TMA descriptor without Triton's slow check of the tensor, which the caller must have checked."""

    def __init__(
        self, base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], block: tuple[int, ...]
    ) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block
        self.layout, self.padding = layout_of(base.dtype, *block), "zero"
        self.form = base.dtype, block


@cache
def layout_of(dtype: torch.dtype, *shape: int) -> gl.NVMMASharedLayout:
    if dtype == torch.float32:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(shape))
    types = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}
    element = types[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(shape), element)
