"""Inputs and outputs that attention backends share, and their checks.

Shape suffixes: R rows of a launch, P packed rows, C pack chunks.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention

from deltafront.kernels.constants import BLOCK, PREFILL_HEAD_DIMS
from deltafront.kernels.interface import AttentionInput, KernelInputError, TileMask


@dataclass(frozen=True)
class QueryRows:
    """The rows of one launch. Row i of q and out has the absolute position row0 + step * i."""

    q_BHRD: torch.Tensor
    out_BHRD: torch.Tensor
    row0: int
    step: int = 1


@dataclass(frozen=True)
class PackedKeys:
    """Packed keys and values of full pack chunks: each run of similar keys is merged into one row, weighted
    by the run's length. k, v and weight may have unused rows at the end.

    Attributes:
        v_BGPD: Each run's packed value times its weight.
        weight_BGP: float32, each run's length. The last tile is all ones, the weights of exact keys.
        offset_BGC: int32, packed rows before each chunk.
        chunk: Tokens of a pack chunk.
        critical: Tokens before each query block that are attended to exactly.
    """

    k_BGPD: torch.Tensor
    v_BGPD: torch.Tensor
    weight_BGP: torch.Tensor
    offset_BGC: torch.Tensor
    chunk: int
    critical: int


def new_output(x: AttentionInput) -> torch.Tensor:
    """Allocate out_BHTD with the memory layout (B, T, H, D), which the output projection reads."""
    batch, heads, rows, dim = x.q_BHTD.shape
    out_BTHD = torch.empty((batch, rows, heads, dim), dtype=x.q_BHTD.dtype, device=x.q_BHTD.device)
    return out_BTHD.transpose(1, 2)


def check_launch(x: AttentionInput) -> None:
    """Check that the attention kernels support x. Raises KernelInputError."""
    dim = x.q_BHTD.shape[3]
    if dim not in PREFILL_HEAD_DIMS:
        raise KernelInputError(f"head dimension {dim} is not one of {PREFILL_HEAD_DIMS}")
    if not (math.isfinite(x.scale) and x.scale > 0):
        raise KernelInputError(f"attention kernels need a finite, positive scale, got {x.scale}")
    if x.k_BGSD.shape[2] >= 1 << 22:
        raise KernelInputError(f"attention kernels take fewer than 2**22 keys, got {x.k_BGSD.shape[2]}")


def causal_tiles(x: AttentionInput, window: int = 0) -> int:
    """Count this chunk's causal tiles over batch and heads; with a window, only the tiles that it
    overlaps."""
    batch, heads = x.q_BHTD.shape[:2]
    return batch * heads * tiles_of_blocks(x.first_block, x.query_blocks, window)


def tiles_of_blocks(first: int, blocks: int, window: int = 0) -> int:
    """Count the causal tiles of `blocks` query blocks of one head, from block `first` on."""
    unseen = sum(window_begin(row, window) for row in range(first, first + blocks)) if window else 0
    return blocks * (first + 1) + blocks * (blocks - 1) // 2 - unseen


def window_begin(row: int, window: int) -> int:
    """Return the index of the first key block that query block `row` may attend to."""
    return max(0, row * BLOCK + 1 - window) // BLOCK


def attend_keys(
    x: AttentionInput,
    heads: slice,
    q_HTD: torch.Tensor,
    k_JD: torch.Tensor,
    v_JD: torch.Tensor,
    mask_TJ: torch.Tensor,
) -> torch.Tensor:
    """Compute float32 out_HTD of some heads of x over the same J keys on the CPU. mask_TJ: an SDPA mask."""
    shape = (1, q_HTD.shape[0], *k_JD.shape)
    k, v = k_JD.float().expand(shape), v_JD.float().expand(shape)
    sink_H = None if x.sink_H is None else x.sink_H[heads]
    return sdpa(q_HTD[None].float(), k, v, mask_TJ, x.scale, sink_H)[0]


def sdpa(
    q_BHTD: torch.Tensor,
    k_BGSD: torch.Tensor,
    v_BGSD: torch.Tensor,
    mask_TS: torch.Tensor,
    scale: float,
    sink_H: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention on the CPU. Sinks are the mask of one more key, whose key and value are zeros."""
    if sink_H is None:
        return scaled_dot_product_attention(
            q_BHTD, k_BGSD, v_BGSD, attn_mask=mask_TS, scale=scale, enable_gqa=True
        )
    if mask_TS.dtype == torch.bool:
        mask_TS = torch.zeros(mask_TS.shape).masked_fill_(~mask_TS, float("-inf"))
    rows, heads = len(mask_TS), len(sink_H)
    bias_HTS = torch.cat(
        [mask_TS.expand(heads, -1, -1), sink_H.float()[:, None, None].expand(-1, rows, 1)], dim=2
    )
    k_BGSD, v_BGSD = (F.pad(side, (0, 0, 0, 1)) for side in (k_BGSD, v_BGSD))
    return scaled_dot_product_attention(
        q_BHTD, k_BGSD, v_BGSD, attn_mask=bias_HTS, scale=scale, enable_gqa=True
    )


def check_mask(x: AttentionInput, mask: TileMask | None, name: str) -> TileMask:
    """Check, without a synchronisation, that there is a mask and that it fits x, and return it. Raises
    KernelInputError."""
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
