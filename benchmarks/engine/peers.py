"""Registers torch's attention as methods of the service, to compare ours with.

`fa2` is SDPA's FlashAttention-2 and `cudnn` SDPA's cuDNN, with the same layers, chunks and pages. Name this
module in `prefill.method_modules` to use them. It must not import torch, because the API server imports it.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltafront.kernels.methods import register


@dataclass(frozen=True)
class Fa2Options:
    """FlashAttention-2 has no options."""


@dataclass(frozen=True)
class CudnnOptions:
    """cuDNN has no options."""


_PARTS = f"{__package__}.peer_attention"
register("fa2", Fa2Options, None, f"{_PARTS}:fa2_backend", source="SDPA, FlashAttention-2", from_keys=True)
register("cudnn", CudnnOptions, None, f"{_PARTS}:cudnn_backend", source="SDPA, cuDNN", from_keys=True)
