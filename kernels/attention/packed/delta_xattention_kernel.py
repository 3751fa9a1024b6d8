"""DeltaXAttention on the GPU. One kernel marks the exact tiles, another attends to exact and packed tiles.

Shape suffixes: N query blocks, M tiles of a block's list.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from deltafront.kernels.attention.flash import start_softmax, step_tile, tile_constants
from deltafront.kernels.attention.inputs import check_launch, new_output
from deltafront.kernels.attention.packed.pack import pack
from deltafront.kernels.attention.packed.runs import PackedRuns
from deltafront.kernels.constants import BLOCK, LOG2E
from deltafront.kernels.interface import AttentionInput, TileMask
from deltafront.kernels.launches import strides
from deltafront.kernels.selectors.rules.rule import ROUNDING

_ROUNDING = tl.constexpr(ROUNDING)


@triton.jit(do_not_specialize=["stride_sn"])
def exact_kernel(
    score_ptr, count_ptr, exact_ptr, stride_sn, exact_share, ENTRIES: tl.constexpr
):  # fmt: skip
    """Mark a list's diagonal, the best ceil(exact_share * n) of its n other tiles, and their ties."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(count_ptr + row)
    entry = tl.arange(0, ENTRIES)
    other = entry < count - 1
    score = tl.load(score_ptr + row * stride_sn + entry, mask=other, other=0.0)
    bits = score.to(tl.int32, bitcast=True)
    # Map floats to integers >= 0 in the same order: negative floats reversed, then positive ones.
    order = tl.where(bits < 0, -1 - (bits & 0x7FFFFFFF).to(tl.int64), bits.to(tl.int64)) + (1 << 31)
    order = tl.where(other, order, -1)
    wanted = tl.ceil(exact_share * (count - 1).to(tl.float32) * _ROUNDING).to(tl.int32)
    limit = tl.zeros([], tl.int64)
    for round in range(32):
        candidate = limit + (tl.full([], 1, tl.int64) << (31 - round))
        limit = tl.where(tl.sum((order >= candidate).to(tl.int32), 0) >= wanted, candidate, limit)
    exact = (other & (order >= limit) & (wanted > 0)) | (entry == count - 1)
    tl.store(exact_ptr + row * stride_sn + entry, exact.to(tl.int8), mask=entry < stride_sn)


def kernel_exact_table(mask: TileMask, exact_share: float) -> torch.Tensor:
    """Compute `delta_xattention.cpu_exact_table` on the GPU, without a synchronisation."""
    assert mask.score_BHNM is not None
    score_BHNM = mask.score_BHNM.contiguous()
    exact_BHNM = torch.empty(score_BHNM.shape, dtype=torch.bool, device=score_BHNM.device)
    rows, entries = mask.count_BHN.numel(), score_BHNM.shape[3]
    exact_kernel[(rows,)](
        score_BHNM,
        mask.count_BHN.contiguous(),
        exact_BHNM.view(torch.int8),
        entries,
        exact_share,
        ENTRIES=triton.next_power_of_2(entries),
        num_warps=4,
    )
    return exact_BHNM


_VARYING = "stride_ib stride_ih stride_in stride_en rows keys row0 packed_slots offset_slots".split()


@triton.jit(do_not_specialize=_VARYING)
def mixed_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, packed_k_ptr, packed_v_ptr, weight_ptr, offset_ptr, index_ptr,
    exact_ptr, count_ptr, sink_ptr, stride_qb, stride_qh, stride_qt, stride_kb, stride_kg, stride_ks,
    stride_vb, stride_vg, stride_vs, stride_ob, stride_oh, stride_ot, stride_ib, stride_ih, stride_in,
    stride_en, heads, group, rows, keys, row0, packed_slots, offset_slots, scale,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention of ROWS rows over their listed tiles, exact or packed, and last the diagonal."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    g = h // group
    row = tile * ROWS + tl.arange(0, ROWS)
    position = row0 + row
    dim = tl.arange(0, D)
    lane = tl.arange(0, COLS)
    valid_row = (row < rows)[:, None]
    q_base = q_ptr + b * stride_qb + h * stride_qh
    q = tl.load(q_base + row.to(tl.int64)[:, None] * stride_qt + dim[None, :], mask=valid_row, other=0.0)
    k_base = k_ptr + b * stride_kb + g * stride_kg
    v_base = v_ptr + b * stride_vb + g * stride_vg
    lane_head = b * (heads // group) + g
    packed_k = packed_k_ptr + lane_head * packed_slots * D
    packed_v = packed_v_ptr + lane_head * packed_slots * D
    acc = tl.zeros([ROWS, D], tl.float32)
    l_i, m_i = start_softmax(sink_ptr, h, ROWS)
    n = tile * ROWS // BLOCK
    blocks = tl.cdiv(rows, BLOCK)
    list_id = tl.program_id(1).to(tl.int64) * blocks + n
    tiles = tl.load(count_ptr + list_id)
    entry_ptr = index_ptr + b * stride_ib + h * stride_ih + n * stride_in
    for i in range(tiles - 1):
        block = tl.load(entry_ptr + i).to(tl.int32)
        if tl.load(exact_ptr + list_id * stride_en + i) != 0:
            for begin in range(block * BLOCK, block * BLOCK + BLOCK, COLS):
                acc, l_i, m_i = step_tile(
                    acc, l_i, m_i, q, k_base, v_base, stride_ks, stride_vs, begin + lane, keys, position,
                    0.0, scale, D, False, False, PRECISION,
                )  # fmt: skip
        else:
            first = tl.load(offset_ptr + lane_head * offset_slots + block)
            stop = tl.load(offset_ptr + lane_head * offset_slots + block + 1)
            for begin in range(first, stop, COLS):
                col = begin + lane
                weight = tl.load(weight_ptr + lane_head * packed_slots + col, mask=col < stop, other=0.0)
                acc, l_i, m_i = step_tile(
                    acc, l_i, m_i, q, packed_k, packed_v, D, D, col, stop,
                    tl.zeros_like(row) + (stop - 1), weight, scale, D, True, True, PRECISION,
                )  # fmt: skip
    diagonal = (row0 + tile * ROWS) // BLOCK * BLOCK
    for begin in range(diagonal, tl.minimum(row0 + tile * ROWS + ROWS, keys), COLS):
        acc, l_i, m_i = step_tile(
            acc, l_i, m_i, q, k_base, v_base, stride_ks, stride_vs, begin + lane, keys, position, 0.0,
            scale, D, True, False, PRECISION,
        )  # fmt: skip
    out_base = out_ptr + b * stride_ob + h * stride_oh
    out = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_base + row.to(tl.int64)[:, None] * stride_ot + dim[None, :], out, mask=valid_row)


def kernel_attend(
    x: AttentionInput, mask: TileMask, state: PackedRuns, exact_BHNM: torch.Tensor, *, means: bool
) -> torch.Tensor:
    """Compute `delta_xattention.cpu_attend` on the GPU."""
    check_launch(x)
    q, k, v = x.q_BHTD, x.k_BGSD, x.v_BGSD
    out = new_output(x)
    packed = pack(x, state, chunks=state.chunks, chunk=BLOCK, critical=0, means=means)
    constants = tile_constants(q) | {"COLS": 64 if q.shape[3] <= 128 else 32}
    tensors = (q, k, v, out, packed.k_BGPD, packed.v_BGPD, packed.weight_BGP, state.offset_BGC)
    lists = (mask.index_BHNM, exact_BHNM.contiguous().view(torch.int8), mask.count_BHN.contiguous())
    sizes = (q.shape[1], x.group, q.shape[2], k.shape[2], x.q_start)
    mixed_kernel[(triton.cdiv(q.shape[2], constants["ROWS"]), q.shape[0] * q.shape[1])](
        *tensors,
        *lists,
        x.sink_H,
        *strides(q, k, v, out, mask.index_BHNM),
        exact_BHNM.shape[3],
        *sizes,
        packed.weight_BGP.shape[2],
        state.offset_BGC.shape[2],
        x.scale * LOG2E,
        **constants,
    )
    return out
