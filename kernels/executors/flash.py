"""Online-softmax attention over three kinds of tile lists: the plain Triton kernel.

It takes any strides, dtype and power-of-two D, and it runs in the interpreter; `flash_hopper.py` is the same
algorithm for the layouts and types that Hopper's copy engine and matrix units like.

Rows of a call are the absolute positions row0 + step * i. RANGE: every key up to each row. LIST: the tiles of
a mask. PACKED: packed runs before the critical region, then every key up to each row. Comments use S keys,
P packed rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

RANGE, LIST, PACKED = 0, 1, 2

NEGATIVE = tl.constexpr(-1.0e30)
"""Score of an unseen key. Finite, so that a row whose first tiles are all unseen stays free of NaN: what it
gathered there is multiplied by exp2(NEGATIVE - m) = 0 once it meets a seen key."""


@triton.jit
def step_tile(
    acc, total, top, q, k_ptr, v_ptr, k_stride, v_stride, col, stop, seen_to, weight, scale,
    D: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile: rows `col` of k and v; those at or after `stop` are absent, those after seen_to unseen."""
    dim = tl.arange(0, D)
    there = (col < stop)[:, None]
    k = tl.load(k_ptr + col.to(tl.int64)[:, None] * k_stride + dim[None, :], mask=there, other=0.0)
    s = tl.dot(q, k.T, input_precision=PRECISION) * scale
    if MASKED:
        s = tl.where(col[None, :] <= seen_to[:, None], s, NEGATIVE)
    higher = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    shrink = tl.exp2(top - higher)
    counted = p * weight[None, :] if WEIGHTED else p
    total = total * shrink + tl.sum(counted, 1)
    v = tl.load(v_ptr + col.to(tl.int64)[:, None] * v_stride + dim[None, :], mask=there, other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, higher


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, packed_k_ptr, packed_v_ptr, weight_ptr, packed_ptr, index_ptr, count_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    packed_batch, packed_head, packed_row, index_batch, index_head, index_row,
    heads, group, rows, keys, row0, step, critical, chunk, packed_slots, chunk_slots, scale,
    MODE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of one query head, longest rows first. PACKED slots: see `launch.py`."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    g = h // group
    row = tile * ROWS + tl.arange(0, ROWS)
    position = row0 + step * row
    dim = tl.arange(0, D)
    inside = (row < rows)[:, None]
    q_base = q_ptr + b * q_batch + h * q_head
    q = tl.load(q_base + row.to(tl.int64)[:, None] * q_row + dim[None, :], mask=inside, other=0.0)
    k_base = k_ptr + b * k_batch + g * k_head
    v_base = v_ptr + b * v_batch + g * v_head
    acc = tl.zeros([ROWS, D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], NEGATIVE, tl.float32)
    last = tl.minimum(row0 + step * (tile * ROWS + ROWS - 1), keys - 1)
    first = row0 + step * tile * ROWS
    lane = tl.arange(0, COLS)
    begin = 0
    if MODE == 1:
        n = tile * ROWS // BLOCK
        entry_ptr = index_ptr + b * index_batch + h * index_head + n * index_row
        kept = tl.load(count_ptr + tl.program_id(1) * (tl.cdiv(rows, BLOCK)) + n)
        for i in range((kept - 1) * (BLOCK // COLS)):
            block = tl.load(entry_ptr + i // (BLOCK // COLS)).to(tl.int32)
            col = block * BLOCK + (i % (BLOCK // COLS)) * COLS + lane
            acc, total, top = step_tile(
                acc, total, top, q, k_base, v_base, k_row, v_row, col, keys, position, 0.0, scale,
                D, False, False, PRECISION,
            )  # fmt: skip
        begin = (row0 + tile * ROWS) // BLOCK * BLOCK
    if MODE == 2:
        # Blocks of rows share one critical region, which begins at a multiple of `chunk`.
        begin = tl.maximum(first // BLOCK * BLOCK - critical, 0) // chunk * chunk
        lane_head = b * (heads // group) + g
        packed = tl.load(packed_ptr + lane_head * chunk_slots + begin // chunk)
        packed_k = packed_k_ptr + b * packed_batch + g * packed_head
        packed_v = packed_v_ptr + b * packed_batch + g * packed_head
        for i in range(tl.cdiv(packed, COLS)):
            col = i * COLS + lane
            weight = tl.load(weight_ptr + lane_head * packed_slots + col, mask=col < packed, other=0.0)
            acc, total, top = step_tile(
                acc, total, top, q, packed_k, packed_v, packed_row, packed_row, col, packed,
                tl.zeros_like(row) + (packed - 1), weight, scale, D, True, True, PRECISION,
            )  # fmt: skip
    whole = tl.maximum((first + 1) // COLS, begin // COLS)
    if MODE != 1:
        for i in range(begin // COLS, whole):
            acc, total, top = step_tile(
                acc, total, top, q, k_base, v_base, k_row, v_row, i * COLS + lane, keys, position, 0.0, scale,
                D, False, False, PRECISION,
            )  # fmt: skip
    else:
        whole = begin // COLS
    for i in range(whole, last // COLS + 1):
        acc, total, top = step_tile(
            acc, total, top, q, k_base, v_base, k_row, v_row, i * COLS + lane, keys, position, 0.0, scale,
            D, True, False, PRECISION,
        )  # fmt: skip
    out_base = out_ptr + b * out_batch + h * out_head
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_base + row.to(tl.int64)[:, None] * out_row + dim[None, :], out, mask=inside)


_STRIDES = [f"{name}_{part}" for name in ("q", "k", "v", "out") for part in ("batch", "head", "row")]
_NUMBERS = (*_STRIDES, "packed_batch", "packed_head", "packed_row", "index_batch", "index_head", "index_row",
            "heads", "group", "rows", "keys", "row0", "step", "critical", "chunk", "packed_slots",
            "chunk_slots")  # fmt: skip
_TYPES = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "packed_k_ptr", "packed_v_ptr"), "*bf16"),
    "weight_ptr": "*fp32",
    "packed_ptr": "*i32",
    "index_ptr": "*i16",
    "count_ptr": "*i32",
    **dict.fromkeys(_NUMBERS, "i32"),
    "scale": "fp32",
}
_SIZES = {"ROWS": 128, "COLS": 128, "BLOCK": 128, "PRECISION": "tf32"}

COMPILE_CASES = [
    (flash_kernel, _TYPES, {"MODE": mode, "D": dim, **_SIZES}, {"num_warps": 8, "num_stages": 2})
    for mode, dim in ((RANGE, 128), (LIST, 64), (PACKED, 128))
]
"""What tests/kernels compiles for sm_90: function, types of its arguments, constants, options."""
