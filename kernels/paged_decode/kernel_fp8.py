"""Paged decode attention over K/V in 8 bits (`layers.kv_fp8`). Suffixes as in `kernel`, whose `_merge` and
`_score` finish what this begins.

A page's e4m3 is read in pairs, as 16-bit words, so that loads, shared memory and the transposition of values
are those of 16-bit pages; a pair then becomes one float16 of the even channels and one of the odd. That is
exact. Both products run over them in float16 with float32 sums.

K's exponents scale the columns of scores. V's are added to scores before the running maximum M is taken:
weights under it, 2^(score + exponent - M), lie within 0 .. 1 and measure what a token adds to the output.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from ..constants import PAGE_TOKENS
from ..layers.kv_fp8 import power_of_2
from .kernel import BUNDLE, _assigned

_PAGE = tl.constexpr(PAGE_TOKENS)
_BUNDLE = tl.constexpr(BUNDLE)
_NATIVE = tl.constexpr(not triton.knobs.runtime.interpret)
_UNPACK = tl.constexpr("""
{
    .reg .b16 first, second;
    .reg .b32 x, y;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.e4m3x2 x, first;
    cvt.rn.f16x2.e4m3x2 y, second;
    prmt.b32 $0, x, y, 0x5410;
    prmt.b32 $1, x, y, 0x7632;
}
""")
"""Two pairs to their two even and their two odd channels. Triton's own conversion takes byte by byte."""


@triton.jit
def _unpacked(pair):
    """The even and the odd channels of int16 pairs of e4m3, in float16."""
    if _NATIVE:
        return tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    word = pair.to(tl.int32)
    return _float16(word & 0xFF), _float16((word >> 8) & 0xFF)


@triton.jit
def _float16(byte):
    bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    number = bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)


@triton.jit(do_not_specialize=["bundles", "max_splits", "requests"])
def _attend_fp8(  # noqa: PLR0915
    q_ptr, k_ptr, v_ptr, k_exponent_ptr, v_exponent_ptr, table_ptr, lengths_ptr, selected_ptr, counts_ptr,
    acc_RHCD_ptr, m_RHC_ptr, l_RHC_ptr, splits_R_ptr, p_RBHT_ptr, m_REHW_ptr, scale_log2, stride_qr,
    stride_qh, stride_p, stride_s, stride_g, stride_ep, stride_es, stride_tr, stride_sr, bundles, max_splits,
    requests,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPARSE: tl.constexpr,
    SCORED: tl.constexpr,
):  # fmt: skip
    """Like `kernel._attend`. k_ptr, v_ptr: of pairs, with strides in pairs, alike for k and v."""
    g, slot = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0) * GROUP
    PAIRS: tl.constexpr = D // 2
    STEP: tl.constexpr = _BUNDLE * BLOCK if SCORED else BLOCK
    r, split, splits, tokens, count = _assigned(
        lengths_ptr, counts_ptr, slot, max_splits, requests, STEP, SPARSE
    )
    table = table_ptr + r * stride_tr
    selected = selected_ptr + r * stride_sr
    if SPARSE:
        selects = count > 0
        last = tl.load(selected + tl.maximum(count, 1) - 1)
        chosen = count * _PAGE - tl.maximum((last + 1) * _PAGE - tokens, 0)
        tokens = tl.where(selects, chosen, tokens)
    active = splits > 0
    split_tokens = tl.cdiv(tl.cdiv(tokens, STEP), tl.maximum(splits, 1)) * STEP
    begin = split * split_tokens
    end = tl.minimum(begin + split_tokens, tokens)

    row = tl.arange(0, ROWS)
    pair = tl.arange(0, PAIRS)
    key = tl.arange(0, BLOCK)
    valid_head = row < GROUP
    head = g * GROUP + row
    q_at = q_ptr + r * stride_qr + head[:, None] * stride_qh + 2 * pair[None, :]
    q_even = tl.load(q_at, mask=valid_head[:, None], other=0.0).to(tl.float32)
    q_odd = tl.load(q_at + 1, mask=valid_head[:, None], other=0.0).to(tl.float32)
    # Rows of q, too, are moved into float16's range by a power of two.
    largest = tl.maximum(tl.max(tl.abs(q_even), 1), tl.max(tl.abs(q_odd), 1))
    q_exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 127, -126)
    q_exponent = tl.minimum(q_exponent, 126)
    q_even = (q_even * power_of_2(-q_exponent)[:, None]).to(tl.float16)
    q_odd = (q_odd * power_of_2(-q_exponent)[:, None]).to(tl.float16)
    q_scale = power_of_2(q_exponent) * scale_log2
    inside = g * stride_g + (key % _PAGE)[:, None] * stride_s + pair[None, :]
    exponent_inside = g + (key % _PAGE) * stride_es

    # Page ids are loaded a block ahead, as are exponents: else they take half of the pipeline's stages.
    column = (begin + key) // _PAGE
    if SPARSE:
        column = tl.load(selected + column, mask=(begin + key < end) & selects, other=column)
    next_page = tl.load(table + column, mask=begin + key < end, other=0)
    at = next_page.to(tl.int64) * stride_ep + exponent_inside
    k_exponent = tl.load(k_exponent_ptr + at, mask=begin + key < end, other=0)
    v_exponent = tl.load(v_exponent_ptr + at, mask=begin + key < end, other=0)
    place = tl.arange(0, _BUNDLE)
    bundle_m = tl.zeros([ROWS, _BUNDLE], tl.float32)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    even = tl.zeros([ROWS, PAIRS], tl.float32)
    odd = tl.zeros([ROWS, PAIRS], tl.float32)
    for start in range(begin, end, BLOCK):
        valid = start + key < end
        page = next_page.to(tl.int64)
        next_key = start + BLOCK + key
        column = next_key // _PAGE
        if SPARSE:
            column = tl.load(selected + column, mask=(next_key < end) & selects, other=column)
        next_page = tl.load(table + column, mask=next_key < end, other=0)

        k_scale = power_of_2(k_exponent.to(tl.int32))
        v_power = v_exponent.to(tl.int32)
        kv_at = inside + page[:, None] * stride_p
        k_even, k_odd = _unpacked(tl.load(k_ptr + kv_at, mask=valid[:, None], other=0))
        s = tl.dot(q_even, tl.trans(k_even))
        s = tl.dot(q_odd, tl.trans(k_odd), s) * q_scale[:, None] * k_scale[None, :]
        s = tl.where(valid[None, :], s + v_power.to(tl.float32)[None, :], float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(s, 1))
        weight = tl.exp2(s - m_ij[:, None])
        alpha = tl.exp2(m_i - m_ij)
        p = weight * power_of_2(-v_power)[None, :]
        l_i = l_i * alpha + tl.sum(p, 1)
        v_even, v_odd = _unpacked(tl.load(v_ptr + kv_at, mask=valid[:, None], other=0))
        weight_16 = weight.to(tl.float16)
        even = tl.dot(weight_16, v_even, even * alpha[:, None])
        odd = tl.dot(weight_16, v_odd, odd * alpha[:, None])
        m_i = m_ij
        at = next_page.to(tl.int64) * stride_ep + exponent_inside
        k_exponent = tl.load(k_exponent_ptr + at, mask=next_key < end, other=0)
        v_exponent = tl.load(v_exponent_ptr + at, mask=next_key < end, other=0)
        if SCORED:
            block = start // BLOCK
            bundle = r * bundles + block // _BUNDLE
            lane = (bundle * _BUNDLE + block % _BUNDLE).to(tl.int64) * heads + head
            tl.store(p_RBHT_ptr + lane[:, None] * BLOCK + key[None, :], p, mask=valid_head[:, None])
            bundle_m = tl.where(place[None, :] == block % _BUNDLE, m_i[:, None], bundle_m)
            bundle_m_ptr = m_REHW_ptr + (bundle.to(tl.int64) * heads + head)[:, None] * _BUNDLE
            flush = (block % _BUNDLE == _BUNDLE - 1) | (start + BLOCK >= end)
            tl.store(bundle_m_ptr + place[None, :], bundle_m, mask=valid_head[:, None] & flush)

    part = (r * heads + head).to(tl.int64) * max_splits + split
    tl.store(m_RHC_ptr + part, m_i, mask=valid_head & active)
    tl.store(l_RHC_ptr + part, l_i, mask=valid_head & active)
    acc_at = acc_RHCD_ptr + part[:, None] * D + 2 * pair[None, :]
    tl.store(acc_at, even, mask=valid_head[:, None] & active)
    tl.store(acc_at + 1, odd, mask=valid_head[:, None] & active)
    tl.store(splits_R_ptr + r, splits, mask=active & (split == 0) & (g == 0))
