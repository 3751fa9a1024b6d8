from __future__ import annotations

import torch

from deltafront.kernels.hopper.host import layout_of


def descriptor_type(dtype: torch.dtype, *shape: int) -> str:
    """Return the argument type of a `TileDescriptor` for compile cases."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    name = {**names, torch.float8_e4m3fn: "fp8e4nv"}[dtype]
    return f"tensordesc<{name}{list(shape)},{layout_of(dtype, *shape)!r}>"
