"""Prepares and launches the attention kernel: which rows, which tiles, which of the two kernels.

Shape suffixes as in `interface.py`; R rows of this launch, P packed rows, C pack chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton

from ..constants import BLOCK, LOG2E, PREFILL_HEAD_DIMS
from ..interface import AttentionInput, KernelInputError, TileMask
from .flash import flash_kernel


@dataclass(frozen=True)
class QueryRows:
    """The rows of one launch: row i of q and out is the absolute position row0 + step * i."""

    q_BHRD: torch.Tensor
    out_BHRD: torch.Tensor
    row0: int
    step: int = 1


@dataclass(frozen=True)
class PackedKeys:
    """Packed keys of the complete chunks. v_BGPD holds each run's mean times its weight; weight_BGP float32.

    offset_BGC: int32, packed rows before each chunk. All three of k, v, weight may be longer than needed;
    weight ends with a tile of ones, the weights of exact keys.
    """

    k_BGPD: torch.Tensor
    v_BGPD: torch.Tensor
    weight_BGP: torch.Tensor
    offset_BGC: torch.Tensor
    chunk: int
    critical: int


def new_output(x: AttentionInput) -> torch.Tensor:
    """Room for out_BHTD, a row's heads side by side in memory: the projection that follows takes it as it
    is."""
    batch, heads, rows, dim = x.q_BHTD.shape
    out_BTHD = torch.empty((batch, rows, heads, dim), dtype=x.q_BHTD.dtype, device=x.q_BHTD.device)
    return out_BTHD.transpose(1, 2)


def launch(
    x: AttentionInput,
    rows: QueryRows,
    tail: QueryRows | None = None,
    *,
    mask: TileMask | None = None,
    packed: PackedKeys | None = None,
) -> None:
    """Attend with `rows` to x's keys: the mask's tiles, packed then exact keys, or (neither) every key.

    lead: further rows, in steps of 1, that see every key; on Hopper they go first in the same launch.
    """
    check_launch(x)
    if takes_hopper(x, rows) and (tail is None or takes_hopper(x, tail)):
        from . import hopper_launch

        hopper_launch.launch(x, rows, tail, mask=mask, packed=packed)
        return
    launch_plain(x, rows, mask=mask, packed=packed)
    if tail is not None:
        launch_plain(x, tail)


def check_launch(x: AttentionInput) -> None:
    """Raise for what neither kernel computes."""
    dim = x.q_BHTD.shape[3]
    if dim not in PREFILL_HEAD_DIMS:
        raise KernelInputError(f"head dimension {dim} is not one of {PREFILL_HEAD_DIMS}")
    if not (math.isfinite(x.scale) and x.scale > 0):
        raise KernelInputError(f"attention kernels need a finite, positive scale, got {x.scale}")
    if x.k_BGSD.shape[2] >= 1 << 22:
        raise KernelInputError(f"attention kernels take fewer than 2**22 keys, got {x.k_BGSD.shape[2]}")


def takes_hopper(x: AttentionInput, rows: QueryRows) -> bool:
    """Whether the Hopper kernel can run: 16-bit, D 64 or 128, compute capability 9, 16-byte strides."""
    if not x.q_BHTD.is_cuda or not is_hopper(x.q_BHTD.device):
        return False
    if x.q_BHTD.dtype == torch.float32 or x.q_BHTD.shape[3] not in (64, 128):
        return False
    return all(_copyable(t) for t in (rows.q_BHRD, rows.out_BHRD, x.k_BGSD, x.v_BGSD))


@cache
def is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _copyable(t: torch.Tensor) -> bool:
    """Whether the copy engine can address t: base and outer strides in 16-byte steps."""
    steps = [s * t.element_size() for s, n in zip(t.stride()[:3], t.shape[:3], strict=True) if n > 1]
    return t.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)


def launch_plain(
    x: AttentionInput, rows: QueryRows, *, mask: TileMask | None = None, packed: PackedKeys | None = None
) -> None:
    """The plain Triton kernel, for any strides and dtype."""
    q, k, v, out = rows.q_BHRD, x.k_BGSD, x.v_BGSD, rows.out_BHRD
    batch, heads, count, dim = q.shape
    size = 64 if q.dtype == torch.float32 else BLOCK
    index_strides = (0, 0, 0) if mask is None else mask.index_BHNM.stride()[:3]
    packed_strides = (0, 0, 0) if packed is None else packed.k_BGPD.stride()[:3]
    flash_kernel[(triton.cdiv(count, size), batch * heads)](
        q,
        k,
        v,
        out,
        k if packed is None else packed.k_BGPD,
        v if packed is None else packed.v_BGPD,
        q if packed is None else packed.weight_BGP,
        q if packed is None else packed.offset_BGC,
        q if mask is None else mask.index_BHNM,
        q if mask is None else mask.count_BHN.contiguous(),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        *packed_strides,
        *index_strides,
        heads,
        x.group,
        count,
        k.shape[2],
        rows.row0,
        rows.step,
        0 if packed is None else packed.critical,
        1 if packed is None else packed.chunk,
        0 if packed is None else packed.weight_BGP.shape[2],
        0 if packed is None else packed.offset_BGC.shape[2],
        x.scale * LOG2E,
        LISTED=mask is not None,
        PACKED=packed is not None,
        D=dim,
        ROWS=size,
        COLS=size,
        BLOCK=BLOCK,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4 if size == 64 else 8,
        num_stages=2,
    )
