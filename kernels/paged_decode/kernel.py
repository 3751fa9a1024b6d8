"""Paged decode attention in Triton (flash-decoding, cut by stream-K). `_attend` computes each split of the
keys, `_merge` combines the splits, `_score` computes page scores without reading the keys again.

Shape suffixes: C splits of a request, B blocks of keys, T keys of a block, E bundles of 8 blocks, W the
blocks of a bundle.

For page scores `_attend` writes each key's p, relative to the running maximum after its block, and that
maximum. After `_merge` has computed the LSE, `_score` turns p into softmax weights. p is stored in place of
the logit, because rounding p to 16 bits costs only the dtype's relative error.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import triton
import triton.language as tl

from deltafront.kernels.constants import LOG2E, PAGE_TOKENS

BUNDLE = 8
"""Blocks of keys whose running maxima are written together."""
_PAGE = tl.constexpr(PAGE_TOKENS)
_BUNDLE = tl.constexpr(BUNDLE)
_LANES = tl.constexpr(128)
"""Requests whose lengths `_share_of` loads at once."""
_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(math.log(2))


@triton.jit
def _window_from(length, STEP: tl.constexpr, WINDOW: tl.constexpr):
    """Return where to start reading the last WINDOW tokens, rounded down to a multiple of STEP."""
    return tl.maximum(length - WINDOW, 0) // STEP * STEP


@triton.jit
def _read(lengths_ptr, counts_ptr, n, valid, STEP: tl.constexpr, SPARSE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the numbers of tokens, of selected pages, and of steps of STEP tokens that requests n read. A
    request that is not `valid` reads nothing."""
    length = tl.load(lengths_ptr + n, mask=valid, other=0)
    count = length
    read = length
    if SPARSE:
        count = tl.load(counts_ptr + n, mask=valid, other=0)
        read = tl.where(count > 0, count * _PAGE, length)
    if WINDOW:
        read = length - _window_from(length, STEP, WINDOW)
    return length, count, tl.cdiv(read, STEP)


@triton.jit
def _share_of(
    lengths_ptr, counts_ptr, slot, slots, requests, STEP: tl.constexpr, SPARSE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Find the steps that a slot computes. A slot is a program's number within its KV head.

    All requests' steps in a row are cut into equal shares, one for each slot (stream-K), so that programs end
    together. To begin a request takes about as long as a step, so each counts one step more, unless all are
    equal: these are cut alike. The lengths are read on the device, so a CUDA graph stays valid.

    Returns:
        The steps of a share, the slot's first step and the one after its last, the request r of its first
            step, the number of steps before r, and the number of steps to begin a request.
    """
    lane = tl.arange(0, _LANES)
    total = 0
    most = 0
    for first_lane in range(0, requests, _LANES):
        n = first_lane + lane
        _length, _count, steps = _read(lengths_ptr, counts_ptr, n, n < requests, STEP, SPARSE, WINDOW)
        total += tl.sum(steps, 0)
        most = tl.maximum(most, tl.max(steps, 0))
    begins = tl.where(total == most * requests, 0, 1)
    total += begins * requests
    share = tl.cdiv(total, slots)
    first = slot * share
    r = 0
    before = 0
    read = 0
    for first_lane in range(0, requests, _LANES):
        n = first_lane + lane
        _length, _count, steps = _read(lengths_ptr, counts_ptr, n, n < requests, STEP, SPARSE, WINDOW)
        steps += tl.where(n < requests, begins, 0)
        over = (read + tl.cumsum(steps, 0) <= first) & (n < requests)
        r += tl.sum(over.to(tl.int32), 0)
        before += tl.sum(tl.where(over, steps, 0), 0)
        read += tl.sum(steps, 0)
    return share, first, tl.minimum(first + share, total), r, before, begins


@triton.jit
def _split_of(
    lengths_ptr, selected_ptr, counts_ptr, r, slot, share, at, last, before, begins, stride_sr,
    STEP: tl.constexpr, SPARSE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Find which tokens of request r a slot reads.

    Args:
        share, last, before, begins: From `_share_of`, for r.
        at: The first step that the slot computes in r.

    Returns:
        The split's index in r, r's number of splits, begin and end of the split's tokens (counted among
            selected tokens if pages are selected), the first token of the window, True if pages are selected,
            and the number of steps before the next request.
    """
    tokens, count, steps = _read(lengths_ptr, counts_ptr, r, True, STEP, SPARSE, WINDOW)
    read_from = before + begins
    after = read_from + steps
    selects = count > 0  # count 0: read every page
    if SPARSE:  # columns ascend, so only the last page can have empty slots
        last_page = tl.load(selected_ptr + r * stride_sr + tl.maximum(count, 1) - 1)
        chosen = count * _PAGE - tl.maximum((last_page + 1) * _PAGE - tokens, 0)
        tokens = tl.where(selects, chosen, tokens)
    first = _window_from(tokens, STEP, WINDOW) if WINDOW else 0
    begin = first + tl.maximum(at - read_from, 0) * STEP
    end = tl.minimum(first + (tl.minimum(last, after) - read_from) * STEP, tokens)
    first_slot = read_from // share
    splits = (after - 1) // share - first_slot + 1
    return slot - first_slot, splits, begin, end, tokens - WINDOW, selects, after


@triton.jit
def _leave_for_score(
    p_RBHT_ptr, m_REHW_ptr, p, m_i, bundle_m, first_bundle, start, end, head, heads, valid_head,
):  # fmt: skip
    """Write p [ROWS, BLOCK] of a block's keys for `_score`. After a bundle's last block, write the bundle's
    maxima. Return the bundle's maxima so far."""
    BLOCK: tl.constexpr = p.shape[1]
    place = tl.arange(0, _BUNDLE)
    block = start // BLOCK
    bundle = first_bundle + block // _BUNDLE
    lane = (bundle * _BUNDLE + block % _BUNDLE).to(tl.int64) * heads + head
    p_at = lane[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(p_RBHT_ptr + p_at, p, mask=valid_head[:, None])
    bundle_m = tl.where(place[None, :] == block % _BUNDLE, m_i[:, None], bundle_m)
    m_at = (bundle.to(tl.int64) * heads + head)[:, None] * _BUNDLE + place[None, :]
    flush = (block % _BUNDLE == _BUNDLE - 1) | (start + BLOCK >= end)
    tl.store(m_REHW_ptr + m_at, bundle_m, mask=valid_head[:, None] & flush)
    return bundle_m


@triton.jit(do_not_specialize=["bundles", "requests"])
def _attend(  # noqa: PLR0915
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, selected_ptr, counts_ptr, acc_RHCD_ptr, m_RHC_ptr,
    l_RHC_ptr, splits_R_ptr, p_RBHT_ptr, m_REHW_ptr, scale_log2, stride_qr, stride_qh, stride_kp,
    stride_ks, stride_kg, stride_vp, stride_vs, stride_vg, stride_tr, stride_sr, bundles, requests,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPARSE: tl.constexpr,
    SCORED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute attention of the query heads of key head g over a slot's splits of requests. The grid is
    (g, slot). ROWS: the query heads, padded for tl.dot."""
    g, slot, slots = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    heads = tl.num_programs(0) * GROUP
    STEP: tl.constexpr = _BUNDLE * BLOCK if SCORED else BLOCK  # a bundle must lie in one split
    share, at, last, r, before, begins = _share_of(
        lengths_ptr, counts_ptr, slot, slots, requests, STEP, SPARSE, WINDOW
    )
    row = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    key = tl.arange(0, BLOCK)
    valid_head = row < GROUP
    head = g * GROUP + row
    k_base = k_ptr + g * stride_kg + (key % _PAGE)[:, None] * stride_ks + d[None, :]
    v_base = v_ptr + g * stride_vg + (key % _PAGE)[:, None] * stride_vs + d[None, :]
    while at < last:
        split, splits, begin, end, seen_from, selects, after = _split_of(
            lengths_ptr, selected_ptr, counts_ptr, r, slot, share, at, last, before, begins, stride_sr, STEP,
            SPARSE, WINDOW,
        )  # fmt: skip
        table = table_ptr + r * stride_tr
        selected = selected_ptr + r * stride_sr
        q_at = r * stride_qr + head[:, None] * stride_qh + d[None, :]
        q = tl.load(q_ptr + q_at, mask=valid_head[:, None], other=0.0).to(k_ptr.dtype.element_ty)

        # Load page ids one block ahead. Otherwise they take half of the pipeline's stages.
        column = (begin + key) // _PAGE
        if SPARSE:
            column = tl.load(selected + column, mask=(begin + key < end) & selects, other=column)
        next_page = tl.load(table + column, mask=begin + key < end, other=0)
        bundle_m = tl.zeros([ROWS, _BUNDLE], tl.float32)
        m_i = tl.full([ROWS], float("-inf"), tl.float32)
        l_i = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        for start in range(begin, end, BLOCK):
            valid = (start + key < end) & (start + key >= seen_from) if WINDOW else start + key < end
            page = next_page.to(tl.int64)[:, None]
            next_key = start + BLOCK + key
            column = next_key // _PAGE
            if SPARSE:
                column = tl.load(selected + column, mask=(next_key < end) & selects, other=column)
            next_page = tl.load(table + column, mask=next_key < end, other=0)

            k = tl.load(k_base + page * stride_kp, mask=valid[:, None], other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            s = tl.where(valid[None, :], s, float("-inf"))
            m_ij = tl.maximum(m_i, tl.max(s, 1))
            p = tl.exp2(s - m_ij[:, None])
            alpha = tl.exp2(m_i - m_ij)
            l_i = l_i * alpha + tl.sum(p, 1)
            v = tl.load(v_base + page * stride_vp, mask=valid[:, None], other=0.0)
            p_16 = p.to(v.dtype)
            acc = tl.dot(p_16, v, acc * alpha[:, None], input_precision="ieee")
            m_i = m_ij
            if SCORED:
                bundle_m = _leave_for_score(
                    p_RBHT_ptr,
                    m_REHW_ptr,
                    p_16,
                    m_i,
                    bundle_m,
                    r * bundles,
                    start,
                    end,
                    head,
                    heads,
                    valid_head,
                )

        part = (r * heads + head).to(tl.int64) * slots + split
        stored = valid_head & (begin < end)  # a share may end while it begins a request
        tl.store(m_RHC_ptr + part, m_i, mask=stored)
        tl.store(l_RHC_ptr + part, l_i, mask=stored)
        tl.store(acc_RHCD_ptr + part[:, None] * D + d[None, :], acc, mask=stored[:, None])
        tl.store(splits_R_ptr + r, splits, mask=(split == 0) & (g == 0))
        at = after
        before = after
        r += 1


@triton.jit(do_not_specialize=["max_splits"])
def _merge(
    acc_RHCD_ptr, m_RHC_ptr, l_RHC_ptr, splits_R_ptr, out_ptr, lse_ptr, max_splits, heads,
    C: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one request r and head h, by program r·heads + h.

    The first C splits are loaded before their number is known. The few requests with more splits load up to M
    in a second step.
    """
    lane = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    splits = tl.load(splits_R_ptr + tl.program_id(0) // heads)
    c = tl.arange(0, C)
    at = lane * max_splits + c
    m_C = tl.load(m_RHC_ptr + at, mask=c < max_splits, other=0.0)
    l_C = tl.load(l_RHC_ptr + at, mask=c < max_splits, other=0.0)
    acc_CD = tl.load(acc_RHCD_ptr + at[:, None] * D + d[None, :], mask=(c < max_splits)[:, None], other=0.0)
    valid = c < splits  # later splits were not written
    m_C = tl.where(valid, m_C, float("-inf"))
    m_i = tl.max(m_C, 0)
    alpha_C = tl.exp2(m_C - m_i)
    l_i = tl.sum(tl.where(valid, l_C, 0.0) * alpha_C, 0)
    acc_D = tl.sum(tl.where(valid[:, None], acc_CD, 0.0) * alpha_C[:, None], 0)
    if splits > C:
        later = C + tl.arange(0, M)
        valid_M = later < splits
        at_M = lane * max_splits + later
        m_M = tl.load(m_RHC_ptr + at_M, mask=valid_M, other=float("-inf"))
        l_M = tl.load(l_RHC_ptr + at_M, mask=valid_M, other=0.0)
        acc_MD = tl.load(acc_RHCD_ptr + at_M[:, None] * D + d[None, :], mask=valid_M[:, None], other=0.0)
        m_ij = tl.maximum(m_i, tl.max(m_M, 0))
        alpha = tl.exp2(m_i - m_ij)
        alpha_M = tl.exp2(m_M - m_ij)
        l_i = l_i * alpha + tl.sum(l_M * alpha_M, 0)
        acc_D = acc_D * alpha + tl.sum(acc_MD * alpha_M[:, None], 0)
        m_i = m_ij
    tl.store(out_ptr + lane * D + d, (acc_D / l_i).to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + lane, (m_i + tl.log2(l_i)) * _LN2)  # base 2 to base e


@triton.jit(do_not_specialize=["bundles"])
def _score(
    p_RBHT_ptr, m_REHW_ptr, lse_ptr, lengths_ptr, score_ptr, heads, columns, bundles,
    H: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Score the spans of SPAN tokens (1, or a page) in BLOCKS blocks of request r. The grid is (chunk of
    blocks, r). H: the query heads, padded."""
    chunk, r = tl.program_id(0), tl.program_id(1)
    SPANS: tl.constexpr = BLOCKS * BLOCK // SPAN
    tokens = tl.load(lengths_ptr + r)
    score = tl.zeros([SPANS], tl.float32)
    if chunk * BLOCKS * BLOCK < tokens:
        h = tl.arange(0, H)
        b = chunk * BLOCKS + tl.arange(0, BLOCKS)
        t = tl.arange(0, BLOCK)
        lse_H = tl.load(lse_ptr + r * heads + h, mask=h < heads, other=0.0) * _LOG2E
        valid_BH = (h[None, :] < heads) & (b[:, None] * BLOCK < tokens)
        lane_BH = (r * bundles * _BUNDLE + b).to(tl.int64)[:, None] * heads + h[None, :]
        bundle_BH = (r * bundles + b // _BUNDLE).to(tl.int64)[:, None] * heads + h[None, :]
        m_BH = tl.load(
            m_REHW_ptr + bundle_BH * _BUNDLE + (b % _BUNDLE)[:, None], mask=valid_BH, other=float("-inf")
        )
        p_BHT = tl.load(
            p_RBHT_ptr + lane_BH[:, :, None] * BLOCK + t[None, None, :], mask=valid_BH[:, :, None], other=0.0
        ).to(tl.float32)
        factor_BH = tl.exp2(m_BH - lse_H[None, :])
        token_BT = tl.max(p_BHT * factor_BH[:, :, None], 1)  # keys past the end have weight 0
        score = tl.sum(tl.reshape(token_BT, [SPANS, SPAN]), 1)
    column = chunk * SPANS + tl.arange(0, SPANS)
    tl.store(score_ptr + r.to(tl.int64) * columns + column, score, mask=column < columns)
