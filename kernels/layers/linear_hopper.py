"""A GEMM for Hopper and large M, in Gluon: x · weightᵀ, or SiLU(x · gateᵀ) · (x · upᵀ).

Tiles of 192 × 256 read a fifth less from L2 than cuBLAS's tiles of 128 × 256. The saved power makes the
kernel faster when the GPU is at its power limit (docs/log/2026-11-25.md at 4fe709c6).

One producer warp copies steps of DEPTH columns into a ring. Three consumer warpgroups multiply 64 rows of x
each. A tile has two pieces of 128 output channels: adjacent pieces, or with GATED one of gate and one of up.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltafront.kernels.constants import LOG2E
from deltafront.kernels.hopper.layouts import GROUP_ROWS
from deltafront.kernels.hopper.ring import Ring, barriers

WARPGROUPS = gl.constexpr(3)
PIECE = gl.constexpr(128)
"""Output channels of a piece of weights."""
DEPTH = gl.constexpr(64)
"""Input columns that are copied at a time."""
STAGES = gl.constexpr(3)
BAND = gl.constexpr(11)
"""Row tiles of a band. A band is multiplied with all weights before the next one, so that its rows of x stay
in L2: 17 MB at 4,096 columns."""
_LOG2E = gl.constexpr(LOG2E)


class LinearWork(NamedTuple):
    """Sizes of a launch. steps: number of steps of DEPTH input columns. apart: weight rows from the start of
    a tile's first piece to the start of its second."""

    row_tiles: gl.tensor
    column_tiles: gl.tensor
    steps: gl.tensor
    apart: gl.tensor


class LinearBuffers(NamedTuple):
    """Shared memory.

    Attributes:
        x: Each warpgroup's 64 rows of x for one step along the input width.
        weight: The two pieces of weight rows for one step. They share x's barriers.
        out: Each warpgroup's 64 output rows of one piece.
    """

    x: Ring
    weight: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor


@gluon.jit
def _tile(number, work):
    band = BAND * work.column_tiles
    first = number // band * BAND
    height = gl.minimum(work.row_tiles - first, BAND)
    return first + number % band % height, number % band // height


@gluon.jit
def _copy_steps(x, weight, buffers, work, GATED: gl.constexpr):
    ring = buffers.x
    use = 0
    for number in range(gl.program_id(0), work.row_tiles * work.column_tiles, gl.num_programs(0)):
        row, column = _tile(number, work)
        row *= WARPGROUPS * GROUP_ROWS
        column *= PIECE if GATED else 2 * PIECE
        for step in range(work.steps):
            ring.wait_empty(use)
            full = ring.when_full(use)
            mbarrier.expect(full, WARPGROUPS * x.block_type.nbytes + 2 * weight.block_type.nbytes)
            at = step * DEPTH
            for warpgroup in gl.static_range(WARPGROUPS):
                rows = ring.buffers.index(use % STAGES * WARPGROUPS + warpgroup)
                tma.async_copy_global_to_shared(x, [row + warpgroup * GROUP_ROWS, at], full, rows)
            pieces = buffers.weight.index(use % STAGES)
            tma.async_copy_global_to_shared(weight, [column, at], full, pieces.slice(0, PIECE))
            tma.async_copy_global_to_shared(
                weight, [column + work.apart, at], full, pieces.slice(PIECE, PIECE)
            )
            use += 1


@gluon.jit
def _store(x, out, buffer, row, column):
    """Store (64, PIECE) numbers by TMA through a buffer, after the previous store has read the buffer."""
    tma.store_wait(0)
    buffer.store(x.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, column], buffer)


@gluon.jit
def _multiply(WARPGROUP: gl.constexpr, out, buffers, work, GATED: gl.constexpr):
    # Use two WGMMAs of 128 columns. One of 256 would take too many registers.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    ring = buffers.x
    out_buffer = buffers.out.index(WARPGROUP)
    use = 0
    for number in range(gl.program_id(0), work.row_tiles * work.column_tiles, gl.num_programs(0)):
        row, column = _tile(number, work)
        acc = gl.zeros([GROUP_ROWS, 2 * PIECE], gl.float32, layout=layout)
        for step in range(work.steps):
            ring.wait_full(use)
            rows = ring.buffers.index(use % STAGES * WARPGROUPS + WARPGROUP)
            pieces = buffers.weight.index(use % STAGES)
            acc = warpgroup_mma(rows, pieces.permute([1, 0]), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # the previous step is done
            ring.release(use - 1, pred=step > 0)
            use += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        ring.release(use - 1)
        first, second = gl.split(gl.permute(gl.reshape(acc, [GROUP_ROWS, 2, PIECE]), [0, 2, 1]))
        row = (row * WARPGROUPS + WARPGROUP) * GROUP_ROWS
        if GATED:
            active = first / (1.0 + gl.exp2(-_LOG2E * first)) * second
            _store(active, out, out_buffer, row, column * PIECE)
        else:
            _store(first, out, out_buffer, row, column * 2 * PIECE)
            _store(second, out, out_buffer, row, column * 2 * PIECE + PIECE)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["row_tiles", "column_tiles", "steps", "apart"])
def linear_hopper_kernel(
    x, weight, out, row_tiles, column_tiles, steps, apart, GATED: gl.constexpr
):  # fmt: skip
    """Run one program. x, weight and out are TMA descriptors of (64, DEPTH), (PIECE, DEPTH) and (64, PIECE)
    tiles. `LinearWork` explains the other arguments."""
    x_smem = gl.allocate_shared_memory(x.dtype, [STAGES * WARPGROUPS, GROUP_ROWS, DEPTH], x.layout)
    weight_smem = gl.allocate_shared_memory(weight.dtype, [STAGES, 2 * PIECE, DEPTH], weight.layout)
    out_smem = gl.allocate_shared_memory(out.dtype, [WARPGROUPS, GROUP_ROWS, PIECE], out.layout)
    full, empty = barriers(STAGES), barriers(STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=WARPGROUPS)
    fence_async_shared()
    buffers = LinearBuffers(Ring(x_smem, full, empty, STAGES), weight_smem, out_smem)
    work = LinearWork(row_tiles, column_tiles, steps, apart)
    # fmt: off
    gl.warp_specialize(
        [
            (_multiply, (0, out, buffers, work, GATED)),
            (_multiply, (1, out, buffers, work, GATED)),
            (_multiply, (2, out, buffers, work, GATED)),
            (_copy_steps, (x, weight, buffers, work, GATED)),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )
    # fmt: on
