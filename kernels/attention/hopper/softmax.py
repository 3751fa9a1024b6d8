"""The online softmax of a consumer warpgroup over one tile's scores.

Scores and weights are (64, 128); a thread has 32 columns of two rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltafront.kernels.attention.hopper.items import Extent, exact_key, packed_before
from deltafront.kernels.hopper.layouts import GROUP_ROWS, TILE, scores_layout

NEGATIVE = gl.constexpr(-1.0e30)
"""A row's running maximum before its first tile. It is finite, because -inf would give NaN."""
UNSEEN = gl.constexpr(-3.0e38)
"""Score of a masked key, far below NEGATIVE. With NEGATIVE, a row whose first tile is all masked would take
exp2 of a rounding error in place of 0."""

_ROUND_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_ROUND_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_TAKE_APART = gl.constexpr("mov.b32 {$0, $1}, $2;")


class Seen(NamedTuple):
    """The keys that a warpgroup's rows may attend to. PACKED rows lie in one block of 128 positions."""

    position: gl.tensor  # (64,), positions of the rows
    extent: Extent
    exact_from: gl.tensor  # (PACKED) the first key that is exact
    packed: gl.tensor  # (PACKED) number of packed keys


class Ends(NamedTuple):
    """The tiles of an item that need a mask: those before masked_end, and those from unmasked_end on. begin
    and tiles: first tile and end of all tiles."""

    masked_end: gl.tensor
    unmasked_end: gl.tensor
    begin: gl.tensor
    tiles: gl.tensor


class Running(NamedTuple):
    """The state of the online softmax. l_i already includes the last tile; acc does not yet."""

    acc: gl.tensor  # (64, D); (PLAN.late_rescale) not yet rescaled by alpha
    m_i: gl.tensor  # (64,)
    l_i: gl.tensor  # (64,), or (64, 8) of every eighth column (PLAN.l_i_in_threads)
    p: gl.tensor  # (64, 128), `rounded` unless PLAN.late_rescale
    alpha: gl.tensor  # (64,)


@gluon.constexpr_function
def acc_layout(dim):
    """Return the layout of acc (64, D) in registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])


@gluon.constexpr_function
def spread_layout():
    """Return the register layout of l_i kept per thread, (64, 8): four threads share a row, two columns
    each."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])


@gluon.jit
def seen_by(item, extent, work, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
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
    if PLAN.split:
        masked_end = gl.minimum(gl.maximum(masked_end, extent.begin + 1), extent.tiles)
    ends = Ends(masked_end, unmasked_end, extent.begin, extent.tiles)
    return Seen(position, extent, exact_from, packed), ends


@gluon.jit
def zero_l_i(PLAN: gl.constexpr):
    if PLAN.l_i_in_threads:
        l_i = gl.zeros([GROUP_ROWS, 8], gl.float32, layout=spread_layout())
    else:
        l_i = gl.zeros([GROUP_ROWS], gl.float32, layout=gl.SliceLayout(1, scores_layout()))
    return l_i


@gluon.jit
def rounded(p, dtype: gl.constexpr, PLAN: gl.constexpr):
    """Round the softmax weights p (64, 128) to 16 bits, in the register layout for p · v. With PLAN.in_pairs,
    return (64, 64) int32 instead, each with the weights of two adjacent columns."""
    if PLAN.in_pairs:
        even, odd = gl.split(gl.reshape(p, [GROUP_ROWS, TILE // 2, 2]))
        code: gl.constexpr = _ROUND_BF16 if dtype == gl.bfloat16 else _ROUND_FP16
        p = gl.inline_asm_elementwise(code, "=r,f,f", [even, odd], gl.int32, True, 1)
    else:
        p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc_layout(PLAN.dim), 2))
    return p


@gluon.jit
def operand(p, dtype: gl.constexpr, PLAN: gl.constexpr):
    """Convert the result of `rounded` to the operand of p · v: with PLAN.in_pairs, unpack the pairs."""
    if PLAN.in_pairs:
        halves: gl.constexpr = (gl.int16, gl.int16)
        even, odd = gl.inline_asm_elementwise(_TAKE_APART, "=h,=h,r", [p], halves, True, 1)
        p = gl.join(even.to(dtype, bitcast=True), odd.to(dtype, bitcast=True))
        p = gl.reshape(p, [GROUP_ROWS, TILE])
        p = gl.convert_layout(p, gl.DotOperandLayout(0, acc_layout(PLAN.dim), 2))
    return p


@gluon.jit
def _add_columns(l_i, x):
    """Add columns j, j + 8, j + 16, … of x to column j of l_i (64, 8), pairwise, within each thread."""
    if x.shape[1] > 8:
        halves = gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1])
        left, right = gl.split(halves)
        l_i = _add_columns(_add_columns(l_i, left), right)
    else:
        l_i += gl.convert_layout(x, l_i.type.layout, assert_trivial=True)
    return l_i


@gluon.jit
def online_softmax(s, m_i, l_i, scale, lengths, WEIGHTED: gl.constexpr, PLAN: gl.constexpr):
    """Return p (unnormalised softmax weights) of one tile's scores s, the new m_i (maximum) and l_i (sum),
    and alpha, the factor that rescales acc. WEIGHTED: key j stands for `lengths[j]` keys; lengths has shape
    (128,)."""
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
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def tile_columns():
    return gl.arange(0, TILE, layout=gl.SliceLayout(0, scores_layout()))


@gluon.jit
def mask_exact(s, column, i, seen, PLAN: gl.constexpr):
    """Mask scores of tile i, a tile of exact keys: set them to UNSEEN where a row may not attend to the
    key."""
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
    """Mask scores of tile i, a tile of packed keys (each a merged run of similar keys): set them to UNSEEN
    where the rows may not attend to the key."""
    return gl.where(((i - seen.extent.exact) * TILE + column < seen.packed)[None, :], s, UNSEEN)
