"""Launches the Hopper attention kernel: descriptors for the copy engine, order of the items, grid."""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..constants import BLOCK, LOG2E
from ..interface import AttentionInput, TileMask
from .flash import LIST, PACKED, RANGE
from .flash_hopper import hopper_kernel
from .launch import Packed, Rows


def launch(
    x: AttentionInput, rows: Rows, lead: Rows | None, *, mask: TileMask | None, packed: Packed | None
) -> None:
    """See `launch.launch`; x, rows and lead satisfy `launch.takes_hopper`."""
    batch, heads, count, dim = rows.q_BHRD.shape
    mode = RANGE if mask is None and packed is None else LIST if packed is None else PACKED
    sizes = _sizes(mode, dim)
    groups = sizes["GROUPS"]
    tiles = triton.cdiv(count, 64 * groups)
    lead_tiles = 0 if lead is None else triton.cdiv(lead.q_BHRD.shape[2], 64 * groups)
    items = batch * heads * (tiles + lead_tiles)
    q, out = _descriptor(rows.q_BHRD, 64), _descriptor(rows.out_BHRD, 64)
    k, v = _descriptor(x.k_BGSD, BLOCK), _descriptor(x.v_BGSD, BLOCK)
    none = x.k_BGSD.new_empty(1, dtype=torch.int32) if mask is None or packed is None else None
    programs = _multiprocessors(x.q_BHTD.device)
    order = _order(x, rows, mask, items // programs)
    hopper_kernel[(min(items, programs),)](
        q,
        k,
        v,
        out,
        q if lead is None else _descriptor(lead.q_BHRD, 64),
        out if lead is None else _descriptor(lead.out_BHRD, 64),
        k if packed is None else _descriptor(packed.k_BGPD, BLOCK),
        v if packed is None else _descriptor(packed.v_BGPD, BLOCK),
        k if packed is None else _descriptor(packed.weight_BGP, BLOCK),
        none if packed is None else packed.offset_BGC,
        none if mask is None else mask.index_BHNM,
        none if mask is None else by_length(mask) if order == BY_LENGTH else mask.count_BHN.contiguous(),
        torch.zeros(1, dtype=torch.int32, device=x.q_BHTD.device),
        *((0, 0, 0) if mask is None else mask.index_BHNM.stride()[:3]),
        items,
        batch,
        heads,
        x.group,
        tiles,
        lead_tiles,
        x.k_BGSD.shape[2],
        rows.row0,
        rows.step,
        0 if lead is None else lead.row0,
        0 if packed is None else packed.critical,
        BLOCK if packed is None else packed.chunk,
        0 if packed is None else packed.offset_BGC.shape[2],
        x.scale * LOG2E,
        MODE=mode,
        ORDER=order,
        D=dim,
        **sizes,
        num_warps=4,
    )


def _sizes(mode: int, dim: int) -> dict[str, int]:
    """Key stages, warpgroups, query buffers each, registers: the fastest that fit (docs/LOG.md).

    Three warpgroups have too few registers at D 128, and a list's tile has the rows of two.
    """
    if mode == LIST:
        return {"STAGES": 2, "GROUPS": 2, "AHEAD": 2, "REGISTERS": 240}
    if dim == 64:
        return {"STAGES": 4, "GROUPS": 3, "AHEAD": 1, "REGISTERS": 160}
    return {"STAGES": 3, "GROUPS": 2, "AHEAD": 1, "REGISTERS": 240}


ONE_HEAD_FIRST, LONGEST_ROWS_FIRST, BY_LENGTH = 0, 1, 2


def _order(x: AttentionInput, rows: Rows, mask: TileMask | None, rounds: int) -> int:
    """In which order programs take items, of which each takes `rounds`.

    One key head's rows after another's, the longest rows of all heads first, or (few lists) the longest lists
    of all. The second balances few items better but streams every key head's keys at once; what they weigh
    decides (measured: dense 16,384 tokens of 8 heads and D 128, 64 MiB, gain 11% by it, 32,768 lose 6%).
    """
    if mask is not None and rounds < 48:
        return BY_LENGTH
    size = 2 * x.k_BGSD.numel() * x.k_BGSD.element_size()
    light = size <= (48 if mask is not None else 96) << 20
    return LONGEST_ROWS_FIRST if rows.step > 1 or light else ONE_HEAD_FIRST


def by_length(mask: TileMask) -> torch.Tensor:
    """The longest list first: count in the upper half, its place in (B, H, N) in the lower.

    Heads differ in density, so a long list may stand anywhere; one that is taken last is waited for.
    """
    count = mask.count_BHN.reshape(-1)
    place = _numbers(triton.next_power_of_2(count.numel()), count.device)[: count.numel()]
    entries = torch.add(place, count, alpha=1 << 32)
    return entries.sort(descending=True).values


@cache
def _numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64, device=device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _descriptor(t: torch.Tensor, block: int) -> TensorDescriptor:
    """How the copy engine sees t: tiles of `block` rows of one head (or so many numbers, if t has no D).

    Strides of dimensions of size 1 do not matter and may be anything.
    """
    strides = [s if n > 1 else 128 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True)]
    shape = [1, 1, block, t.shape[3]] if t.dim() == 4 else [1, 1, block]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], shape, _layout(t.dtype, *shape))


@cache
def _layout(dtype: torch.dtype, *shape: int) -> gl.NVMMASharedLayout:
    """Kept, because making one takes longer than the rest of a descriptor."""
    if len(shape) == 3:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(shape), element)


def _case(
    mode: int, dim: int, order: int = ONE_HEAD_FIRST, dtype: torch.dtype = torch.bfloat16
) -> tuple[object, dict[str, str], dict[str, int], dict[str, int]]:
    def tile(rows: int) -> str:
        shape = [1, 1, rows, dim]
        name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        return f"tensordesc<{name}{shape},{_layout(dtype, *shape)!r}>"

    line = _layout(torch.float32, 1, 1, BLOCK)
    types = {
        **dict.fromkeys(("q", "out", "q_lead", "out_lead"), tile(64)),
        **dict.fromkeys(("k", "v", "packed_k", "packed_v"), tile(BLOCK)),
        "weight": f"tensordesc<fp32[1, 1, 128],{line!r}>" if mode == PACKED else tile(BLOCK),
        "index_ptr": "*i16",
        "order_ptr": "*i64" if order == BY_LENGTH else "*i32",
        **dict.fromkeys(("counter_ptr", "packed_ptr"), "*i32"),
        **dict.fromkeys(("index_batch", "index_head", "index_row", "items", "batch", "heads"), "i32"),
        **dict.fromkeys(("group", "tiles", "lead_tiles", "keys", "row0", "step", "lead_row0"), "i32"),
        **dict.fromkeys(("critical", "chunk", "chunk_slots"), "i32"),
        "scale": "fp32",
    }
    constants = {"MODE": mode, "ORDER": order, "D": dim, **_sizes(mode, dim)}
    return hopper_kernel, types, constants, {"num_warps": 4}


COMPILE_CASES = [
    *(_case(mode, dim) for mode in (RANGE, LIST, PACKED) for dim in (64, 128)),
    _case(LIST, 64, BY_LENGTH),
    _case(PACKED, 64, dtype=torch.float16),
]
"""What tests/kernels compiles for sm_90: function, types of its arguments, constants, options."""
