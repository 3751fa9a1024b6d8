"""Paged decode attention in Triton: split over keys (flash-decoding), merged, and page scores in one pass.

Shape suffixes as in `pages.py`; C splits, B blocks of keys, T keys of a block, E groups of 8
blocks, W the 8 blocks of a group.

`_attend` reads each key and value once. For page scores it also leaves what it computed anyway: the
weights of each key under the running maximum of its block, in the pages' dtype, and that maximum. Once
`_merge` knows the LSE, `_score` turns them into weights; they are heads × tokens, 1/(2 D / group) of what
was read (1.6% for D 128 and 4 heads a group). Storing weights under a near maximum rather than logits
keeps their relative error that of the dtype, however large the logits are. All heads of a block lie
together, and the maxima of 8 blocks: small writes between the reads cost far more than their bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend(  # noqa: PLR0915
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    selected_ptr,
    counts_ptr,
    part_RHCD_ptr,
    top_RHC_ptr,
    sum_RHC_ptr,
    weight_RBHT_ptr,
    top_REHW_ptr,
    scale_log2,
    q_stride_r,
    q_stride_h,
    k_stride_p,
    k_stride_s,
    k_stride_g,
    v_stride_p,
    v_stride_s,
    v_stride_g,
    table_stride,
    selected_stride,
    scratch_groups,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    SCORED: tl.constexpr,
):
    """One key head, split and request: program (g, split, r). ROWS pads the group to what tl.dot takes."""
    g, split, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    heads = tl.num_programs(0) * GROUP
    table = table_ptr + r * table_stride
    selected = selected_ptr + r * selected_stride
    tokens = tl.load(lengths_ptr + r)
    if SPARSE:  # ascending, so only the last selected page can have empty slots
        count = tl.load(counts_ptr + r)
        last = tl.load(selected + count - 1)
        tokens = count * 16 - tl.maximum((last + 1) * 16 - tokens, 0)
    STEP: tl.constexpr = 8 * BLOCK if SCORED else BLOCK  # no group of 8 blocks in two splits
    share = tl.cdiv(tl.cdiv(tokens, STEP), splits) * STEP
    begin = split * share
    end = tl.minimum(begin + share, tokens)

    row = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    key = tl.arange(0, BLOCK)
    real = row < GROUP
    head = g * GROUP + row
    q_at = r * q_stride_r + head[:, None] * q_stride_h + d[None, :]
    q = tl.load(q_ptr + q_at, mask=real[:, None], other=0.0).to(k_ptr.dtype.element_ty)
    k_base = k_ptr + g * k_stride_g + (key % 16)[:, None] * k_stride_s + d[None, :]
    v_base = v_ptr + g * v_stride_g + (key % 16)[:, None] * v_stride_s + d[None, :]

    # The page ids are loaded a block ahead: else the pipeliner gives them half of its stages.
    column = (begin + key) // 16
    if SPARSE:
        column = tl.load(selected + column, mask=begin + key < end, other=0)
    ahead = tl.load(table + column, mask=begin + key < end, other=0)
    eight = tl.arange(0, 8)
    tops = tl.zeros([ROWS, 8], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in range(begin, end, BLOCK):
        valid = start + key < end
        page = ahead.to(tl.int64)[:, None]
        soon = start + BLOCK + key
        column = soon // 16
        if SPARSE:
            column = tl.load(selected + column, mask=soon < end, other=0)
        ahead = tl.load(table + column, mask=soon < end, other=0)

        k = tl.load(k_base + page * k_stride_p, mask=valid[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        s = tl.where(valid[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(v_base + page * v_stride_p, mask=valid[:, None], other=0.0)
        weight = p.to(v.dtype)
        acc = tl.dot(weight, v, acc * fade[:, None], input_precision="ieee")
        top = new_top
        if SCORED:
            block = start // BLOCK
            group = r * scratch_groups + block // 8
            lane = (group * 8 + block % 8).to(tl.int64) * heads + head
            tl.store(weight_RBHT_ptr + lane[:, None] * BLOCK + key[None, :], weight, mask=real[:, None])
            tops = tl.where(eight[None, :] == block % 8, top[:, None], tops)
            lane_top = group.to(tl.int64) * heads + head
            full = (block % 8 == 7) | (start + BLOCK >= end)
            tl.store(top_REHW_ptr + lane_top[:, None] * 8 + eight[None, :], tops, mask=real[:, None] & full)

    part = (r * heads + head).to(tl.int64) * splits + split
    tl.store(top_RHC_ptr + part, top, mask=real)  # -inf where the split has no keys
    tl.store(sum_RHC_ptr + part, total, mask=real)
    tl.store(part_RHCD_ptr + part[:, None] * D + d[None, :], acc, mask=real[:, None])


@triton.jit
def _merge(
    part_RHCD_ptr,
    top_RHC_ptr,
    sum_RHC_ptr,
    out_ptr,
    lse_ptr,
    splits,
    C: tl.constexpr,
    D: tl.constexpr,
):
    """Joins the splits of one request and head: program r·heads + h."""
    lane = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    d = tl.arange(0, D)
    there = c < splits
    top_C = tl.load(top_RHC_ptr + lane * splits + c, mask=there, other=float("-inf"))
    sum_C = tl.load(sum_RHC_ptr + lane * splits + c, mask=there, other=0.0)
    part_at = (lane * splits + c)[:, None] * D + d[None, :]
    part_CD = tl.load(part_RHCD_ptr + part_at, mask=there[:, None], other=0.0)
    top = tl.max(top_C, 0)
    fade_C = tl.exp2(top_C - top)
    total = tl.sum(sum_C * fade_C, 0)
    out_D = tl.sum(part_CD * fade_C[:, None], 0) / total
    tl.store(out_ptr + lane * D + d, out_D.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + lane, (top + tl.log2(total)) * 0.6931471805599453)  # base 2 to base e


@triton.jit
def _score(
    weight_RBHT_ptr,
    top_REHW_ptr,
    lse_ptr,
    lengths_ptr,
    score_ptr,
    heads,
    columns,
    scratch_groups,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Scores of the pages of BLOCKS blocks of one request: program (chunk, r). H pads the heads."""
    chunk, r = tl.program_id(0), tl.program_id(1)
    PAGES: tl.constexpr = BLOCKS * BLOCK // 16
    tokens = tl.load(lengths_ptr + r)
    score = tl.zeros([PAGES], tl.float32)
    if chunk * BLOCKS * BLOCK < tokens:
        h = tl.arange(0, H)
        b = chunk * BLOCKS + tl.arange(0, BLOCKS)
        t = tl.arange(0, BLOCK)
        lse_H = tl.load(lse_ptr + r * heads + h, mask=h < heads, other=0.0) * 1.4426950408889634
        live_BH = (h[None, :] < heads) & (b[:, None] * BLOCK < tokens)
        lane_BH = (r * scratch_groups * 8 + b).to(tl.int64)[:, None] * heads + h[None, :]
        group_BH = (r * scratch_groups + b // 8).to(tl.int64)[:, None] * heads + h[None, :]
        top_BH = tl.load(top_REHW_ptr + group_BH * 8 + (b % 8)[:, None], mask=live_BH, other=float("-inf"))
        weight_BHT = tl.load(
            weight_RBHT_ptr + lane_BH[:, :, None] * BLOCK + t[None, None, :],
            mask=live_BH[:, :, None],
            other=0.0,
        ).to(tl.float32)
        factor_BH = tl.exp2(top_BH - lse_H[None, :])
        token_BT = tl.max(weight_BHT * factor_BH[:, :, None], 1)  # keys past the end have weight 0
        score = tl.sum(tl.reshape(token_BT, [PAGES, 16]), 1)
    column = chunk * PAGES + tl.arange(0, PAGES)
    tl.store(score_ptr + r.to(tl.int64) * columns + column, score, mask=column < columns)


_ATTEND = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "weight_RBHT_ptr"), "*bf16"),
    **dict.fromkeys(("table_ptr", "lengths_ptr", "selected_ptr", "counts_ptr"), "*i32"),
    **dict.fromkeys(("part_RHCD_ptr", "top_RHC_ptr", "sum_RHC_ptr", "top_REHW_ptr"), "*fp32"),
    "scale_log2": "fp32",
    **dict.fromkeys(("q_stride_r", "q_stride_h"), "i32"),
    **dict.fromkeys(("k_stride_p", "k_stride_s", "k_stride_g"), "i32"),
    **dict.fromkeys(("v_stride_p", "v_stride_s", "v_stride_g"), "i32"),
    **dict.fromkeys(("table_stride", "selected_stride", "scratch_groups"), "i32"),
}
_SIZES = {"GROUP": 4, "ROWS": 16, "D": 128, "BLOCK": 64}
_PARTS = {"part_RHCD_ptr": "*fp32", "top_RHC_ptr": "*fp32", "sum_RHC_ptr": "*fp32"}

COMPILE_CASES = [
    (_attend, _ATTEND, {**_SIZES, "SPARSE": False, "SCORED": False}),
    (_attend, _ATTEND, {**_SIZES, "SPARSE": False, "SCORED": True}),
    (_attend, _ATTEND, {**_SIZES, "SPARSE": True, "SCORED": False}),
    (_attend, _ATTEND, {**_SIZES, "GROUP": 3, "D": 64, "BLOCK": 128, "SPARSE": False, "SCORED": True}),
    (_merge, {**_PARTS, "out_ptr": "*bf16", "lse_ptr": "*fp32", "splits": "i32"}, {"C": 8, "D": 128}),
    (
        _score,
        {
            "weight_RBHT_ptr": "*bf16",
            "top_REHW_ptr": "*fp32",
            "lse_ptr": "*fp32",
            "lengths_ptr": "*i32",
            "score_ptr": "*fp32",
            "heads": "i32",
            "columns": "i32",
            "scratch_groups": "i32",
        },
        {"H": 32, "BLOCK": 64, "BLOCKS": 1},
    ),
]
"""What tests/kernels compiles for sm_90: function, types of its arguments, constants."""
