"""Paged decode attention over an int8 KV cache (`layers.kv_int8`). It replaces `_attend` of `kernel.py`, and
reuses that file's `_merge`, `_score` and suffixes.

A page's numbers are read in pairs, as 16-bit words, so that loads, shared memory and the transposition of
values work as for 16-bit pages. Each pair is then split into an even and an odd channel, exactly, in float16.
q · k and p · v multiply float16 and accumulate in float32.

K's scales multiply the scores, V's scales the softmax weights. The running maximum M is taken over scores
plus about log2(V's scale). So the factors of values, 2^(score - M) · scale, are at most 1.1.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.layers.kv_int8 import UNIT, scale_of
from deltafront.kernels.paged_decode.kernel import BUNDLE, _leave_for_score, _share_of, _split_of

_PAGE = tl.constexpr(PAGE_TOKENS)
_BUNDLE = tl.constexpr(BUNDLE)
_NATIVE = tl.constexpr(not triton.knobs.runtime.interpret)
_UNPACK = tl.constexpr("""
{
    .reg .b32 x, y, least;
    mov.b32 least, 0x64806480;
    prmt.b32 x, $2, 0x64646464, 0x4240;
    prmt.b32 y, $2, 0x64646464, 0x4341;
    sub.f16x2 $0, x, least;
    sub.f16x2 $1, y, least;
}
""")
"""Splits two pairs into two even and two odd channels. The float16 with bytes 0x64 and b is 1024 + b."""


@triton.jit
def _unpacked(pair):
    """Return the even and the odd channels of pairs (int16) in float16, with 128 subtracted."""
    if _NATIVE:
        return tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    word = pair.to(tl.int32)
    return ((word & 0xFF) - 128).to(tl.float16), (((word >> 8) & 0xFF) - 128).to(tl.float16)


@triton.jit
def _power_of_2(exponent):
    """Return 2^exponent in float32. exponent: int32 within -126 .. 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["bundles", "requests"])
def _attend_int8(  # noqa: PLR0915
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, selected_ptr, counts_ptr,
    acc_RHCD_ptr, m_RHC_ptr, l_RHC_ptr, splits_R_ptr, p_RBHT_ptr, m_REHW_ptr, scale_log2, stride_qr,
    stride_qh, stride_p, stride_s, stride_g, stride_scale_p, stride_scale_s, stride_tr, stride_sr, bundles,
    requests,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPARSE: tl.constexpr,
    SCORED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute `kernel._attend` over int8 pages. k_ptr and v_ptr point to pairs; strides count pairs."""
    g, slot, slots = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    heads = tl.num_programs(0) * GROUP
    PAIRS: tl.constexpr = D // 2
    STEP: tl.constexpr = _BUNDLE * BLOCK if SCORED else BLOCK  # a bundle must lie in one split
    share, at, last, r, before, begins = _share_of(
        lengths_ptr, counts_ptr, slot, slots, requests, STEP, SPARSE, WINDOW
    )
    row = tl.arange(0, ROWS)
    pair = tl.arange(0, PAIRS)
    key = tl.arange(0, BLOCK)
    valid_head = row < GROUP
    head = g * GROUP + row
    inside = g * stride_g + (key % _PAGE)[:, None] * stride_s + pair[None, :]
    scale_inside = g + (key % _PAGE) * stride_scale_s
    while at < last:
        split, splits, begin, end, seen_from, selects, after = _split_of(
            lengths_ptr, selected_ptr, counts_ptr, r, slot, share, at, last, before, begins, stride_sr, STEP,
            SPARSE, WINDOW,
        )  # fmt: skip
        table = table_ptr + r * stride_tr
        selected = selected_ptr + r * stride_sr
        q_at = q_ptr + r * stride_qr + head[:, None] * stride_qh + 2 * pair[None, :]
        q_even = tl.load(q_at, mask=valid_head[:, None], other=0.0).to(tl.float32)
        q_odd = tl.load(q_at + 1, mask=valid_head[:, None], other=0.0).to(tl.float32)
        # Scale each row of q by a power of two into float16's range.
        largest = tl.maximum(tl.max(tl.abs(q_even), 1), tl.max(tl.abs(q_odd), 1))
        q_exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 127, -126)
        q_exponent = tl.minimum(q_exponent, 126)
        q_even = (q_even * _power_of_2(-q_exponent)[:, None]).to(tl.float16)
        q_odd = (q_odd * _power_of_2(-q_exponent)[:, None]).to(tl.float16)
        q_scale = _power_of_2(q_exponent) * (scale_log2 * UNIT)

        # Load page ids and scales one block ahead. Otherwise they take half of the pipeline's stages.
        column = (begin + key) // _PAGE
        if SPARSE:
            column = tl.load(selected + column, mask=(begin + key < end) & selects, other=column)
        next_page = tl.load(table + column, mask=begin + key < end, other=0)
        scale_at = next_page.to(tl.int64) * stride_scale_p + scale_inside
        k_byte = tl.load(k_scale_ptr + scale_at, mask=begin + key < end, other=0)
        v_byte = tl.load(v_scale_ptr + scale_at, mask=begin + key < end, other=0)
        bundle_m = tl.zeros([ROWS, _BUNDLE], tl.float32)
        m_i = tl.full([ROWS], float("-inf"), tl.float32)
        l_i = tl.zeros([ROWS], tl.float32)
        even = tl.zeros([ROWS, PAIRS], tl.float32)
        odd = tl.zeros([ROWS, PAIRS], tl.float32)
        for start in range(begin, end, BLOCK):
            valid = (start + key < end) & (start + key >= seen_from) if WINDOW else start + key < end
            page = next_page.to(tl.int64)
            next_key = start + BLOCK + key
            column = next_key // _PAGE
            if SPARSE:
                column = tl.load(selected + column, mask=(next_key < end) & selects, other=column)
            next_page = tl.load(table + column, mask=next_key < end, other=0)

            k_factor = scale_of(k_byte)
            v_factor = scale_of(v_byte)
            v_log2 = v_byte.to(tl.float32) * 0.125 - 15.0  # linear between powers of two: up to 0.09 too low
            kv_at = inside + page[:, None] * stride_p
            k_even, k_odd = _unpacked(tl.load(k_ptr + kv_at, mask=valid[:, None], other=0))
            s = tl.dot(q_even, tl.trans(k_even))
            s = tl.dot(q_odd, tl.trans(k_odd), s) * q_scale[:, None] * k_factor[None, :]
            s = tl.where(valid[None, :], s, float("-inf"))
            m_ij = tl.maximum(m_i, tl.max(s + v_log2[None, :], 1))
            p = tl.exp2(s - m_ij[:, None])
            alpha = tl.exp2(m_i - m_ij)
            l_i = l_i * alpha + tl.sum(p, 1)
            v_even, v_odd = _unpacked(tl.load(v_ptr + kv_at, mask=valid[:, None], other=0))
            weight_16 = (p * v_factor[None, :]).to(tl.float16)
            even = tl.dot(weight_16, v_even, even * alpha[:, None])
            odd = tl.dot(weight_16, v_odd, odd * alpha[:, None])
            m_i = m_ij
            scale_at = next_page.to(tl.int64) * stride_scale_p + scale_inside
            k_byte = tl.load(k_scale_ptr + scale_at, mask=next_key < end, other=0)
            v_byte = tl.load(v_scale_ptr + scale_at, mask=next_key < end, other=0)
            if SCORED:
                bundle_m = _leave_for_score(
                    p_RBHT_ptr, m_REHW_ptr, p, m_i, bundle_m, r * bundles, start, end, head, heads, valid_head
                )

        part = (r * heads + head).to(tl.int64) * slots + split
        stored = valid_head & (begin < end)
        tl.store(m_RHC_ptr + part, m_i, mask=stored)
        tl.store(l_RHC_ptr + part, l_i, mask=stored)
        acc_at = acc_RHCD_ptr + part[:, None] * D + 2 * pair[None, :]
        tl.store(acc_at, even * UNIT, mask=stored[:, None])
        tl.store(acc_at + 1, odd * UNIT, mask=stored[:, None])
        tl.store(splits_R_ptr + r, splits, mask=(split == 0) & (g == 0))
        at = after
        before = after
        r += 1
