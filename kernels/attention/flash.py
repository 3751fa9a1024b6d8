"""FlashAttention as a plain Triton kernel, for any strides, dtype and power-of-two D.

Row i has the absolute position row0 + step * i. With LISTED it attends to the tiles of a mask, with PACKED to
packed runs and to the exact keys of its critical region, otherwise to every key up to itself.

Strides are in elements, a tuple for each tensor: q and out (B, H, R), k and v (B, G, S), packed (B, G, P).
The strides of the mask's index (B, H, N) vary with the prompt. So the kernel takes them as separate numbers:
Triton would compile a kernel for each value in a tuple.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl

from deltafront.kernels.attention.inputs import PackedKeys, QueryRows
from deltafront.kernels.constants import BLOCK, LOG2E
from deltafront.kernels.interface import AttentionInput, TileMask

NEGATIVE = tl.constexpr(-1.0e30)
"""Score of a masked key. It is finite, because -inf would give NaN in a row whose keys are all masked."""


_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def step_tile(
    acc, l_i, m_i, q, k_ptr, v_ptr, stride_ks, stride_vs, col, stop, seen_to, weight, scale,
    D: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW: tl.constexpr = 0,
):  # fmt: skip
    """Add one tile, rows `col` of k and v, to the online softmax. Only keys before `stop` exist. If MASKED, a
    row attends to keys up to `seen_to`, with WINDOW only to the last WINDOW of them."""
    dim = tl.arange(0, D)
    valid = (col < stop)[:, None]
    k = tl.load(k_ptr + col.to(tl.int64)[:, None] * stride_ks + dim[None, :], mask=valid, other=0.0)
    s = tl.dot(q, k.T, input_precision=PRECISION) * scale
    if MASKED:
        s = tl.where(col[None, :] <= seen_to[:, None], s, NEGATIVE)
        if WINDOW:
            s = tl.where(col[None, :] > seen_to[:, None] - WINDOW, s, NEGATIVE)
    m_ij = tl.maximum(m_i, tl.max(s, 1))
    p = tl.exp2(s - m_ij[:, None])
    alpha = tl.exp2(m_i - m_ij)
    counted = p * weight[None, :] if WEIGHTED else p
    l_i = l_i * alpha + tl.sum(counted, 1)
    v = tl.load(v_ptr + col.to(tl.int64)[:, None] * stride_vs + dim[None, :], mask=valid, other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, l_i, m_ij


@triton.jit
def start_softmax(sink_ptr, h, ROWS: tl.constexpr):
    """Return l_i and m_i of ROWS rows before their first key. They count the head's attention sink, unless
    sink_ptr is None."""
    l_i = tl.zeros([ROWS], tl.float32)
    m_i = tl.full([ROWS], NEGATIVE, tl.float32)
    if sink_ptr is not None:
        l_i = l_i + 1.0
        m_i = tl.zeros_like(m_i) + tl.load(sink_ptr + h).to(tl.float32) * _LOG2E
    return l_i, m_i


_VARYING = "stride_ib stride_ih stride_in rows keys row0 critical packed_slots chunk_slots".split()


@triton.jit(do_not_specialize=_VARYING)
def flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, packed_k_ptr, packed_v_ptr, weight_ptr, packed_ptr, index_ptr,
    count_ptr, sink_ptr, q_strides, k_strides, v_strides, out_strides, packed_strides, stride_ib, stride_ih,
    stride_in, heads, group, rows, keys, row0, step, critical, chunk, packed_slots, chunk_slots, scale,
    LISTED: tl.constexpr, PACKED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute attention for ROWS rows of one query head; the first programs take the last rows.
    `inputs.PackedKeys` explains the packed arguments. WINDOW: sliding window in keys, including the row's own
    key; 0: none. sink_ptr: each head's attention sink; None: none."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    g = h // group
    row = tile * ROWS + tl.arange(0, ROWS)
    position = row0 + step * row
    dim = tl.arange(0, D)
    valid_row = (row < rows)[:, None]
    q_base = q_ptr + b * q_strides[0] + h * q_strides[1]
    q = tl.load(q_base + row.to(tl.int64)[:, None] * q_strides[2] + dim[None, :], mask=valid_row, other=0.0)
    k_base = k_ptr + b * k_strides[0] + g * k_strides[1]
    v_base = v_ptr + b * v_strides[0] + g * v_strides[1]
    acc = tl.zeros([ROWS, D], tl.float32)
    l_i, m_i = start_softmax(sink_ptr, h, ROWS)
    last = tl.minimum(row0 + step * (tile * ROWS + ROWS - 1), keys - 1)
    first = row0 + step * tile * ROWS
    lane = tl.arange(0, COLS)
    begin = 0
    if LISTED:
        n = tile * ROWS // BLOCK
        entry_ptr = index_ptr + b * stride_ib + h * stride_ih + n * stride_in
        tiles = tl.load(count_ptr + tl.program_id(1) * (tl.cdiv(rows, BLOCK)) + n)
        for i in range((tiles - 1) * (BLOCK // COLS)):
            block = tl.load(entry_ptr + i // (BLOCK // COLS)).to(tl.int32)
            col = block * BLOCK + (i % (BLOCK // COLS)) * COLS + lane
            acc, l_i, m_i = step_tile(
                acc, l_i, m_i, q, k_base, v_base, k_strides[2], v_strides[2], col, keys, position, 0.0, scale,
                D, MASKED=False, WEIGHTED=False, PRECISION=PRECISION,
            )  # fmt: skip
        begin = (row0 + tile * ROWS) // BLOCK * BLOCK
    if PACKED:
        # The rows of a block share a critical region, which begins at a multiple of `chunk`.
        begin = tl.maximum(first // BLOCK * BLOCK - critical, 0) // chunk * chunk
        lane_head = b * (heads // group) + g
        packed = tl.load(packed_ptr + lane_head * chunk_slots + begin // chunk)
        packed_k = packed_k_ptr + b * packed_strides[0] + g * packed_strides[1]
        packed_v = packed_v_ptr + b * packed_strides[0] + g * packed_strides[1]
        for i in range(tl.cdiv(packed, COLS)):
            col = i * COLS + lane
            weight = tl.load(weight_ptr + lane_head * packed_slots + col, mask=col < packed, other=0.0)
            acc, l_i, m_i = step_tile(
                acc, l_i, m_i, q, packed_k, packed_v, packed_strides[2], packed_strides[2], col, packed,
                tl.zeros_like(row) + (packed - 1), weight, scale,
                D, MASKED=True, WEIGHTED=True, PRECISION=PRECISION,
            )  # fmt: skip
    masked_from = tl.maximum((first + 1) // COLS, begin // COLS)
    if WINDOW:  # tiles at the window's start need a mask, too
        begin = tl.maximum(first - WINDOW + 1, 0) // COLS * COLS
        whole_from = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW + 1, 0), COLS), masked_from)
        for i in range(begin // COLS, whole_from):
            acc, l_i, m_i = step_tile(
                acc, l_i, m_i, q, k_base, v_base, k_strides[2], v_strides[2], i * COLS + lane, keys, position,
                0.0, scale, D, MASKED=True, WEIGHTED=False, PRECISION=PRECISION, WINDOW=WINDOW,
            )  # fmt: skip
        begin = whole_from * COLS
    if not LISTED:
        for i in range(begin // COLS, masked_from):
            acc, l_i, m_i = step_tile(
                acc, l_i, m_i, q, k_base, v_base, k_strides[2], v_strides[2], i * COLS + lane, keys, position,
                0.0, scale, D, MASKED=False, WEIGHTED=False, PRECISION=PRECISION,
            )  # fmt: skip
    else:
        masked_from = begin // COLS
    for i in range(masked_from, last // COLS + 1):
        acc, l_i, m_i = step_tile(
            acc, l_i, m_i, q, k_base, v_base, k_strides[2], v_strides[2], i * COLS + lane, keys, position,
            0.0, scale, D, MASKED=True, WEIGHTED=False, PRECISION=PRECISION, WINDOW=WINDOW,
        )  # fmt: skip
    out_base = out_ptr + b * out_strides[0] + h * out_strides[1]
    out = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_base + row.to(tl.int64)[:, None] * out_strides[2] + dim[None, :], out, mask=valid_row)


def launch_plain(
    x: AttentionInput,
    rows: QueryRows,
    *,
    mask: TileMask | None = None,
    packed: PackedKeys | None = None,
    window: int = 0,
) -> None:
    q, k, v, out = rows.q_BHRD, x.k_BGSD, x.v_BGSD, rows.out_BHRD
    batch, heads, count, _ = q.shape
    runs, run_sizes = (k, v, q, q), (0, 1, 0, 0)
    run_strides: tuple[int, ...] = (0, 0, 0)
    if packed is not None:
        runs = packed.k_BGPD, packed.v_BGPD, packed.weight_BGP, packed.offset_BGC
        run_strides = packed.k_BGPD.stride()[:3]
        run_sizes = packed.critical, packed.chunk, packed.weight_BGP.shape[2], packed.offset_BGC.shape[2]
    lists = (q, q)
    list_strides: tuple[int, ...] = (0, 0, 0)
    if mask is not None:
        lists, list_strides = (mask.index_BHNM, mask.count_BHN.contiguous()), mask.index_BHNM.stride()[:3]
    constants = tile_constants(q)
    tensors = (q, k, v, out, *runs, *lists, x.sink_H)
    sizes = (heads, x.group, count, k.shape[2], rows.row0, rows.step, *run_sizes)
    flash_kernel[(triton.cdiv(count, constants["ROWS"]), batch * heads)](
        *tensors,
        *(tensor.stride()[:3] for tensor in (q, k, v, out)),
        run_strides,
        *list_strides,
        *sizes,
        x.scale * LOG2E,
        LISTED=mask is not None,
        PACKED=packed is not None,
        WINDOW=window,
        **constants,
    )


def tile_constants(q_BHRD: torch.Tensor) -> dict[str, Any]:
    size, dim = 64 if q_BHRD.dtype == torch.float32 else BLOCK, q_BHRD.shape[3]
    precision, warps = ("ieee", 4) if size == 64 else ("tf32", 8)
    cols = size // 2 if dim > 128 else size  # two stages of keys and values fit into shared memory
    sizes = {"D": dim, "ROWS": size, "COLS": cols, "BLOCK": BLOCK}
    return {**sizes, "PRECISION": precision, "num_warps": warps, "num_stages": 2}
