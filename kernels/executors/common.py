"""What the executors share: where they run, how causal tiles are counted, checks of a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..interface import AttentionInput, KernelInputError, TileMask

if TYPE_CHECKING:
    import torch


def causal_tiles(x: AttentionInput) -> int:
    """128x128 tiles that touch the causal triangle of this chunk, over batch and heads."""
    batch, heads = x.q_BHTD.shape[:2]
    blocks = x.query_blocks
    return batch * heads * (blocks * (x.first_block + 1) + blocks * (blocks - 1) // 2)


def scalar(value: float, x: AttentionInput) -> torch.Tensor:
    """A float64 scalar on x's device, made without a host sync."""
    import torch

    return torch.full((), value, dtype=torch.float64, device=x.q_BHTD.device)


def check_mask(x: AttentionInput, mask: TileMask | None, name: str) -> TileMask:
    """The mask, if its shapes, types and device fit x; nothing on the device is read."""
    import torch

    x.require_aligned(name)
    if mask is None:
        raise KernelInputError(f"{name} needs a tile mask, from a selector")
    rows = (*x.q_BHTD.shape[:2], x.query_blocks)
    index, count = mask.index_BHNM, mask.count_BHN
    if index.dim() != 4 or tuple(index.shape[:3]) != rows or tuple(count.shape) != rows:
        raise KernelInputError(
            f"{name}: mask shapes {tuple(index.shape)} and {tuple(count.shape)} do not fit "
            f"batch, heads, query blocks {rows}"
        )
    if index.dtype != torch.int16 or count.dtype != torch.int32:
        raise KernelInputError(f"{name}: mask must be int16 and int32, got {index.dtype} and {count.dtype}")
    if index.device != x.q_BHTD.device or count.device != x.q_BHTD.device:
        raise KernelInputError(f"{name}: mask is on {index.device}, q is on {x.q_BHTD.device}")
    if index.stride(3) != 1:
        raise KernelInputError(f"{name}: the mask's index must be contiguous in its last dimension")
    return mask
