"""Tile sizes of Hopper kernels and the register layout of a tile of scores."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltafront.kernels.constants import BLOCK

WARPGROUP_ROWS = 64
"""Rows of one WGMMA instruction, issued by one warpgroup."""
GROUP_ROWS = gl.constexpr(WARPGROUP_ROWS)
TILE = gl.constexpr(BLOCK)
"""Keys per tile."""


@gluon.constexpr_function
def scores_layout(bits=16):
    """Return the WGMMA register layout of (64, 128) scores. bits: size of an input element."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 256 // bits])
