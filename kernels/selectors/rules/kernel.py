"""Selects tiles on the GPU from scores or from `Sums`. Scores become integers, and bisection finds the lowest
integer whose tiles are kept.

Shape suffixes: R rows of `Sums` of one query block, W key blocks of the whole prompt, rounded up to a power
of two. W does not depend on the chunk, so that sums are always computed in the same order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, KernelInputError, TileMask
from deltafront.kernels.launches import Launcher, next_power_of_2, strides
from deltafront.kernels.selectors.rules.rule import (
    LARGER,
    LEVELS,
    MAX_BLOCKS,
    ROUNDING,
    TINY,
    Rule,
    check_scores,
)
from deltafront.kernels.selectors.rules.sums import Sums

_SCORES_ONLY = tl.constexpr(-1)
_CUMULATIVE = tl.constexpr(0)
_TOP_K = tl.constexpr(1)
_TINY, _LARGER = tl.constexpr(TINY), tl.constexpr(LARGER)
_ROUNDING = tl.constexpr(ROUNDING)
_KINDS = {"cumulative": _CUMULATIVE.value, "top_k": _TOP_K.value}


@triton.jit
def fast_log2(x):
    """Approximate log2 of normal positive numbers within 2e-5, at half of log2's cost. -inf for 0."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) | 0x4B000000).to(tl.float32, bitcast=True) - 8388735.0  # 2^23 + 127
    t = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    series = -0.1912625 + t * 0.0442437
    series = 1.4418359 + t * (-0.7083722 + t * (0.4135551 + t * series))
    return tl.where(x > 0.0, exponent + t * series, float("-inf"))


@triton.jit
def in_16_bits(log2_sum):
    """Convert to fp16. Values above fp16's range are clamped, because infinity would give NaN."""
    return tl.minimum(log2_sum, 60000.0).to(tl.float16)


@triton.jit
def _highest_floor(level_W, weight_W, forced_W, need, limit):
    """Compute `cpu._highest_floor` of one row, or another floor that keeps the same tiles."""
    low = tl.zeros((), tl.int32)
    high = tl.zeros((), tl.int32) + limit
    while high - low > 1:
        middle = low + (high - low) // 2
        kept = tl.sum(tl.where((level_W >= middle) | forced_W, weight_W, 0), axis=0).to(tl.float32)
        low = tl.where(kept >= need, middle, low)
        high = tl.where(kept > need, high, tl.where(kept < need, middle, middle + 1))
    return low


@triton.jit
def _kept(
    score_W, column_W, diagonal, threshold, sink_blocks, window_blocks,
    KIND: tl.constexpr, OUTSIDE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return the tiles of a row that the rule keeps (`rule.Rule`). score_W is 0 after the diagonal."""
    causal_W = column_W <= diagonal
    forced_W = causal_W & ((column_W > diagonal - window_blocks) | (column_W < sink_blocks))
    ranked_W = causal_W
    row_max = tl.max(score_W, axis=0)
    any_positive = row_max > 0.0
    if OUTSIDE:
        ranked_W = causal_W & (forced_W == 0)
        score_W = tl.where(ranked_W, score_W, 0.0)
        row_max = tl.max(score_W, axis=0)
    if KIND == _CUMULATIVE:
        larger = tl.where(row_max < _TINY, _LARGER, 1.0)
        per_level = LEVELS / tl.where(row_max > 0.0, row_max * larger, 1.0)
        level_W = (score_W * larger * per_level + 0.5).to(tl.int32)
        need = threshold * tl.sum(level_W, axis=0).to(tl.float32)
        floor = _highest_floor(level_W, level_W, forced_W, need, LEVELS + 2)
        kept_W = level_W >= tl.where(threshold < 1.0, floor, 0)
    else:
        bits_W = score_W.to(tl.int32, bitcast=True)
        need = tl.ceil(threshold * tl.sum(ranked_W.to(tl.int32), axis=0).to(tl.float32) * _ROUNDING)
        floor = _highest_floor(bits_W, ranked_W.to(tl.int32), forced_W, need, tl.max(bits_W, axis=0) + 2)
        kept_W = bits_W >= floor
    return (tl.where(any_positive, kept_W, causal_W) & causal_W) | forced_W


@triton.jit
def _score_of_sums(in_ptr, stride_r, column_W, causal_W, R: tl.constexpr, W: tl.constexpr):
    score_W = tl.zeros((W,), tl.float32)
    next_W = tl.load(in_ptr + column_W, mask=causal_W, other=float("-inf"))
    for row in range(R):
        part_W = next_W.to(tl.float32)
        more_W = causal_W & (row + 1 < R)  # prefetch the next row
        next_W = tl.load(in_ptr + (row + 1) * stride_r + column_W, mask=more_W, other=float("-inf"))
        row_max = tl.max(part_W, axis=0)
        p_W = tl.exp2(part_W - tl.where(row_max == float("-inf"), 0.0, row_max))
        row_sum = tl.sum(p_W, axis=0)
        score_W += p_W * (1.0 / tl.where(row_sum > 0.0, row_sum, 1.0))
    return score_W


_VARYING = "stride_mb stride_mh stride_mn stride_cb stride_ch first_block sink_blocks window_blocks".split()


@triton.jit(do_not_specialize=_VARYING)
def _rule_kernel(
    in_ptr, threshold_ptr, index_ptr, count_ptr, score_ptr, stride_ib, stride_ih, stride_in, stride_ir,
    stride_mb, stride_mh, stride_mn, stride_cb, stride_ch, heads, first_block, sink_blocks, window_blocks,
    R: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, OUTSIDE: tl.constexpr, LEVELS: tl.constexpr,
    WITH_SCORES: tl.constexpr,
):  # fmt: skip
    """Select the tiles of one query block. in_ptr holds `Sums`, or scores if R = 0. KIND = _SCORES_ONLY:
    write the scores and select nothing."""
    row = tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    diagonal = first_block + row
    column_W = tl.arange(0, W)
    causal_W = column_W <= diagonal
    in_ptr += batch * stride_ib + head * stride_ih + row.to(tl.int64) * stride_in
    if R == 0:
        score_W = tl.load(in_ptr + column_W, mask=causal_W, other=0.0).to(tl.float32)
    else:
        score_W = _score_of_sums(in_ptr, stride_ir, column_W, causal_W, R, W)
    place = batch * stride_mb + head * stride_mh + row.to(tl.int64) * stride_mn
    if KIND == _SCORES_ONLY:
        tl.store(score_ptr + place + column_W, score_W, mask=column_W < stride_mn)
    else:
        threshold = tl.load(threshold_ptr + head)
        kept_W = _kept(
            score_W, column_W, diagonal, threshold, sink_blocks, window_blocks, KIND, OUTSIDE, LEVELS
        )
        slot_W = tl.cumsum(kept_W.to(tl.int32), axis=0) - 1
        tl.store(index_ptr + place + slot_W, column_W.to(tl.int16), mask=kept_W)
        if WITH_SCORES:
            tl.store(score_ptr + place + slot_W, score_W, mask=kept_W)
        tl.store(count_ptr + batch * stride_cb + head * stride_ch + row, tl.sum(kept_W.to(tl.int32), axis=0))


_apply = Launcher(_rule_kernel)


def empty_mask(x: AttentionInput, with_scores: bool = False) -> TileMask:
    shape = (*x.q_BHTD.shape[:2], x.query_blocks, x.key_blocks)
    device = x.q_BHTD.device
    return TileMask(
        torch.empty(shape, dtype=torch.int16, device=device),
        torch.empty(shape[:3], dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device) if with_scores else None,
    )


def width_of(prompt_tokens: int) -> int:
    """Return W, a prompt's padded number of key blocks. Raises KernelInputError above MAX_BLOCKS."""
    blocks = -(-prompt_tokens // BLOCK)
    if blocks > MAX_BLOCKS:
        raise KernelInputError(f"{blocks} key blocks, but at most {MAX_BLOCKS} can be ranked")
    return max(16, next_power_of_2(blocks))


def apply_to_sums(
    x: AttentionInput,
    sums: Sums,
    rule: Rule | None,
    index_BHNM: torch.Tensor | None,
    count_BHN: torch.Tensor | None,
    score_BHNM: torch.Tensor | None,
) -> None:
    """Select the tiles of a slab of query blocks by `rule`, and write the slab's rows of the mask's given
    tables. Without a rule, write only the scores."""
    given = (index_BHNM, count_BHN, score_BHNM)
    tables = [None if table is None else table[:, :, sums.first_row :] for table in given]
    part = sums.part_BHNRM
    form = {"R": part.shape[3], "W": width_of(x.prompt_tokens)}
    _launch(part, part.stride()[:4], rule, x.first_block + sums.first_row, tables, form)


def _launch(
    scores: torch.Tensor,
    score_strides: Sequence[int],
    rule: Rule | None,
    first_block: int,
    tables: Sequence[torch.Tensor | None],
    form: dict[str, Any],
) -> None:
    batch, heads, rows = scores.shape[:3]
    index_BHNM, count_BHN, score_BHNM = tables
    table = score_BHNM if index_BHNM is None else index_BHNM
    assert table is not None
    _apply[(rows, batch * heads)](
        scores,
        None if rule is None else rule.thresholds(heads, scores.device),
        *tables,
        *score_strides,
        *strides(table),
        *((0, 0) if count_BHN is None else count_BHN.stride()[:2]),
        heads,
        first_block,
        1 if rule is None else rule.sink_blocks,
        1 if rule is None else rule.window_blocks,
        **form,
        KIND=_SCORES_ONLY.value if rule is None else _KINDS[rule.kind],
        OUTSIDE=rule is not None and rule.outside,
        LEVELS=LEVELS,
        WITH_SCORES=rule is not None and score_BHNM is not None,
        num_warps=min(16, max(1, form["W"] // 1024)),  # with one warp, sums need no barrier
    )


def select(score_BHNM: torch.Tensor, rule: Rule, first_block: int, *, with_scores: bool = False) -> TileMask:
    check_scores(score_BHNM, first_block)
    if score_BHNM.stride(3) != 1:
        raise KernelInputError("scores must be contiguous along key blocks")
    columns, device = score_BHNM.shape[3], score_BHNM.device
    index_BHNM = torch.empty(score_BHNM.shape, dtype=torch.int16, device=device)
    count_BHN = torch.empty(score_BHNM.shape[:3], dtype=torch.int32, device=device)
    kept_BHNM = torch.empty_like(index_BHNM, dtype=torch.float32) if with_scores else None
    form = {"R": 0, "W": max(16, next_power_of_2(columns))}
    tables = (index_BHNM, count_BHN, kept_BHNM)
    _launch(score_BHNM, (*score_BHNM.stride()[:3], 0), rule, first_block, tables, form)
    return TileMask(*tables)
