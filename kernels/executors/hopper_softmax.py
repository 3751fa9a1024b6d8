"""What a computing warpgroup of the Hopper kernel does with one tile's scores. See `flash_hopper.py`.

Scores and weights are (64, 128), a thread has 32 columns of two rows. How weights and sums are handed on
differs by mode (RANGE 0, LIST 1, PACKED 2) and head size: each is what was fastest there (docs/LOG.md).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NEGATIVE = gl.constexpr(-1.0e30)
"""A row's largest score before its first tile; finite for the reason given in `flash.py`."""
UNSEEN = gl.constexpr(-3.0e38)
"""Score of an unseen key, far below NEGATIVE. With equal scores, a row that sees nothing of its first tile
would have m = s * scale rounded, s * scale - m not: exp2 of what the rounding left may be infinite."""

_ROUND_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_ROUND_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@gluon.constexpr_function
def in_pairs(mode: int, dim: int) -> bool:
    """Whether weights are handed on as 32-bit numbers that hold two. An item's tiles then take several loops.

    Between loops LLVM keeps 16-bit numbers apart and has 64 instructions put them together for every tile.
    """
    return (mode == 2 and dim == 64) or (mode == 0 and dim == 128)


@gluon.constexpr_function
def is_late(mode: int, dim: int) -> bool:
    """Whether weights are rounded and acc is shrunk while the next scores are made, and a sum is waited for
    after the next exponentials. Where faster.
    """
    return mode == 2 and dim == 128


@gluon.constexpr_function
def is_spread(mode: int, dim: int) -> bool:
    """Whether each of a row's four threads adds up its weights until the item's end. Where faster."""
    return mode == 1 or (mode == 2 and dim == 64)


@gluon.jit
def rounded(p, dtype: gl.constexpr, o_layout: gl.constexpr, PAIRS: gl.constexpr):
    """Weights p (64, 128) in 16 bits: as the sum's operand, or (64, 64) pairs of columns."""
    if PAIRS:
        even, odd = gl.split(gl.reshape(p, [64, 64, 2]))
        code: gl.constexpr = _ROUND_BF16 if dtype == gl.bfloat16 else _ROUND_FP16
        w = gl.inline_asm_elementwise(code, "=r,f,f", [even, odd], gl.int32, True, 1)
    else:
        w = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
    return w


@gluon.jit
def operand(w, dtype: gl.constexpr, o_layout: gl.constexpr, PAIRS: gl.constexpr):
    """The sum's operand from what `rounded` gave."""
    if PAIRS:
        halves: gl.constexpr = (gl.int16, gl.int16)
        even, odd = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [w], halves, True, 1)
        p = gl.join(even.to(dtype, bitcast=True), odd.to(dtype, bitcast=True))
        w = gl.convert_layout(gl.reshape(p, [64, 128]), gl.DotOperandLayout(0, o_layout, 2))
    return w


@gluon.jit
def _add_columns(total, x):
    """total (64, 8) and the sums of every eighth column of x, in pairs. Nothing leaves its thread."""
    if x.shape[1] > 8:
        halves = gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), [0, 2, 1])
        left, right = gl.split(halves)
        total = _add_columns(_add_columns(total, left), right)
    else:
        total += gl.convert_layout(x, total.type.layout, assert_trivial=True)
    return total


@gluon.jit
def weigh(s, m, mass, scale, weight, WEIGHTED: gl.constexpr):
    """Exponentials p of one tile's products s; the new m and mass; what shrinks the sums so far.

    mass: a row's sum, or (64, 8) that of every eighth column, so that threads need not speak to each other.
    """
    top = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - top[:, None])
    shrink = gl.exp2(m - top)
    counted = p * weight[None, :] if WEIGHTED else p
    if len(mass.shape) == 2:
        less = gl.convert_layout(shrink, gl.SliceLayout(1, mass.type.layout), assert_trivial=True)
        mass = _add_columns(mass * less[:, None], counted)
    else:
        mass = mass * shrink + gl.sum(counted, 1)
    return p, top, mass, shrink


@gluon.jit
def shrunk(acc, shrink):
    """acc (64, D) in terms of the new largest scores."""
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def hide(s, column, i, seen, MODE: gl.constexpr, FAR: gl.constexpr):
    """Scores s of tile i (FAR: of packed keys), UNSEEN where a row does not see the key.

    PACKED: a row sees the keys from key_from to itself. Unsigned, those before are as far as those after.
    """
    position, whole, masked, exact, begin, key_from, packed = seen
    if FAR:
        s = gl.where(((i - exact) * 128 + column < packed)[None, :], s, UNSEEN)
    elif MODE == 2:
        key = gl.where(i < masked, whole + i, begin + i - masked) * 128 - key_from + column
        count = position + 1 - key_from
        s = gl.where(key.to(gl.uint32)[None, :] < count.to(gl.uint32)[:, None], s, UNSEEN)
    else:
        s = gl.where((whole + i) * 128 + column[None, :] <= position[:, None], s, UNSEEN)
    return s
