"""What a computing warpgroup of the Hopper kernel does with one tile's scores. See `flash_hopper.py`.

Scores and weights are (64, 128), a thread has 32 columns of two rows. How weights and sums are handed on
differs by what is attended to and by head size: see `hopper_plan.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...hopper.layouts import GROUP_ROWS, TILE, scores_layout
from .items import Extent, exact_key, packed_before

NEGATIVE = gl.constexpr(-1.0e30)
"""A row's largest score before its first tile; finite for the reason given in `flash.py`."""
UNSEEN = gl.constexpr(-3.0e38)
"""Score of an unseen key, far below NEGATIVE. With equal scores, a row that sees nothing of its first tile
would have top = s * scale rounded, s * scale - top not: exp2 of what the rounding left may be infinite."""

_ROUND_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_ROUND_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_TAKE_APART = gl.constexpr("mov.b32 {$0, $1}, $2;")


class Seen(NamedTuple):
    """Which keys a warpgroup's rows see. (PACKED) The rows lie in one block of 128 positions."""

    position: gl.tensor  # (64,), of each row
    extent: Extent
    exact_from: gl.tensor  # (PACKED) the first key that is exact
    packed: gl.tensor  # (PACKED) packed keys before it


class Ends(NamedTuple):
    """Where a warpgroup's tiles of one item change kind. Those before hidden_end hold keys that some row does
    not see; so do (PACKED) those from clear_end on, which are of packed keys. tiles: their number."""

    masked_end: gl.tensor
    unmasked_end: gl.tensor
    tiles: gl.tensor


class Running(NamedTuple):
    """What a warpgroup hands on from tile to tile: its rows' sums so far, and the last tile's weights, which
    are counted in mass and not yet summed in acc."""

    acc: gl.tensor  # (64, D), the weighted sum of values; (PLAN.late_rescale) not yet shrunk by `shrink`
    m_i: gl.tensor  # (64,), the largest scores
    l_i: gl.tensor  # (64,), the sums of weights; or (64, 8), of every eighth column (PLAN.l_i_in_threads)
    p: gl.tensor  # (64, 128) the last tile's, as `rounded` gives them, or (PLAN.late_rescale) not rounded
    alpha: gl.tensor  # (64,), what the last tile's new largest scores shrink the sums by


@gluon.constexpr_function
def acc_layout(dim):
    """(64, D), likewise."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])


@gluon.constexpr_function
def spread_layout():
    """(64, 8): two columns of each row in each of its four threads."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])


@gluon.jit
def seen_by(item, extent, work, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """What the warpgroup's rows of an item see, and where its tiles change kind."""
    lane = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, scores_layout()))
    position = extent.first + extent.step * (WARPGROUP * GROUP_ROWS + lane)
    masked_end = extent.masked
    unmasked_end = extent.tiles
    exact_from = 0
    packed = 0
    if PLAN.packed:
        row = gl.minimum(extent.first + WARPGROUP * GROUP_ROWS, work.keys - 1)
        exact_from, packed = packed_before(row, item, work)
        masked_end = gl.minimum(extent.masked + exact_from // TILE - extent.exact_block, extent.exact)
        unmasked_end = extent.exact + packed // TILE
    return Seen(position, extent, exact_from, packed), Ends(masked_end, unmasked_end, extent.tiles)


@gluon.jit
def zero_l_i(PLAN: gl.constexpr):
    """No weights yet."""
    if PLAN.l_i_in_threads:
        l_i = gl.zeros([GROUP_ROWS, 8], gl.float32, layout=spread_layout())
    else:
        l_i = gl.zeros([GROUP_ROWS], gl.float32, layout=gl.SliceLayout(1, scores_layout()))
    return l_i


@gluon.jit
def rounded(p, dtype: gl.constexpr, PLAN: gl.constexpr):
    """Weights p (64, 128) in 16 bits: as the sum's operand, or (64, 64) pairs of columns."""
    if PLAN.in_pairs:
        even, odd = gl.split(gl.reshape(p, [GROUP_ROWS, TILE // 2, 2]))
        code: gl.constexpr = _ROUND_BF16 if dtype == gl.bfloat16 else _ROUND_FP16
        p = gl.inline_asm_elementwise(code, "=r,f,f", [even, odd], gl.int32, True, 1)
    else:
        p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc_layout(PLAN.dim), 2))
    return p


@gluon.jit
def operand(p, dtype: gl.constexpr, PLAN: gl.constexpr):
    """The sum's operand from what `rounded` gave."""
    if PLAN.in_pairs:
        halves: gl.constexpr = (gl.int16, gl.int16)
        even, odd = gl.inline_asm_elementwise(_TAKE_APART, "=h,=h,r", [p], halves, True, 1)
        p = gl.join(even.to(dtype, bitcast=True), odd.to(dtype, bitcast=True))
        p = gl.reshape(p, [GROUP_ROWS, TILE])
        p = gl.convert_layout(p, gl.DotOperandLayout(0, acc_layout(PLAN.dim), 2))
    return p


@gluon.jit
def _add_columns(l_i, x):
    """total (64, 8) and the sums of every eighth column of x, in pairs. Nothing leaves its thread."""
    if x.shape[1] > 8:
        halves = gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1])
        left, right = gl.split(halves)
        l_i = _add_columns(_add_columns(l_i, left), right)
    else:
        l_i += gl.convert_layout(x, l_i.type.layout, assert_trivial=True)
    return l_i


@gluon.jit
def online_softmax(s, m_i, l_i, scale, lengths, WEIGHTED: gl.constexpr, PLAN: gl.constexpr):
    """Weights p of one tile's products s; the new top and mass; what shrinks the sums so far.

    WEIGHTED: the tile's keys stand for `lengths` (128,) keys each.
    """
    m_ij = gl.maximum(m_i, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - m_ij[:, None])
    alpha = gl.exp2(m_i - m_ij)
    counted = p * lengths[None, :] if WEIGHTED else p
    if PLAN.l_i_in_threads:
        alpha_thread = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout), assert_trivial=True)
        l_i = _add_columns(l_i * alpha_thread[:, None], counted)
    else:
        l_i = l_i * alpha + gl.sum(counted, 1)
    return p, m_ij, l_i, alpha


@gluon.jit
def rescaled(acc, alpha):
    """acc (64, D) in terms of the new largest scores."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def tile_columns():
    """A number for each key of a tile."""
    return gl.arange(0, TILE, layout=gl.SliceLayout(0, scores_layout()))


@gluon.jit
def mask_exact(s, column, i, seen, PLAN: gl.constexpr):
    """Scores s of tile i, UNSEEN where a row does not see the key: (PACKED) it sees those from exact_from to
    itself. Unsigned, those before are as far as those after."""
    if PLAN.packed:
        key = exact_key(i, seen.extent) - seen.exact_from + column
        count = seen.position + 1 - seen.exact_from
        s = gl.where(key.to(gl.uint32)[None, :] < count.to(gl.uint32)[:, None], s, UNSEEN)
    else:
        key = (seen.extent.masked_block + i) * TILE + column
        s = gl.where(key[None, :] <= seen.position[:, None], s, UNSEEN)
    return s


@gluon.jit
def mask_packed(s, column, i, seen):
    """Scores s of tile i, one of packed keys, UNSEEN from the first that no row of the warpgroup sees."""
    return gl.where(((i - seen.extent.exact) * TILE + column < seen.packed)[None, :], s, UNSEEN)
