"""Shared memory of the Hopper attention kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from deltafront.kernels.hopper.layouts import GROUP_ROWS, TILE
from deltafront.kernels.hopper.ring import Ring, barriers

ENTRIES = gl.constexpr(2)
"""Buffers for the next item's entry (`items.py`)."""


class Buffers(NamedTuple):
    """Shared memory, filled by the producer warp.

    Attributes:
        q: One buffer is (1, 1, 64, D): one warpgroup's queries, later its output.
        k, v: One buffer is (1, 1, 128, D): a tile of keys or values, which every warpgroup reads.
        lengths: (PACKED) One buffer is (1, 1, 128) float32: the run lengths of the packed keys in k.
            `lengths` shares k's barriers.
        entries: One buffer is (1,) int64: a work item, encoded as `items.py` explains.
    """

    q: Ring
    k: Ring
    v: Ring
    lengths: gl.shared_memory_descriptor
    entries: Ring


@gluon.jit
def new_buffers(q, k, v, weight, PLAN: gl.constexpr):
    """Allocate the buffers. q, k, v, weight: TMA descriptors of the tensors to load."""
    STAGES: gl.constexpr = PLAN.stages
    READERS: gl.constexpr = PLAN.warpgroups
    QUERIES: gl.constexpr = PLAN.warpgroups * PLAN.query_buffers
    q_smem = gl.allocate_shared_memory(q.dtype, [QUERIES, 1, 1, GROUP_ROWS, PLAN.dim], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, TILE, PLAN.dim], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, TILE, PLAN.dim], v.layout)
    lengths = v_smem  # unused
    if PLAN.packed:
        lengths = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, TILE], weight.layout)
    q_full, q_empty = barriers(QUERIES), barriers(QUERIES)
    k_full, k_empty = barriers(STAGES), barriers(STAGES)
    v_full, v_empty = barriers(STAGES), barriers(STAGES)
    for buffer in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(buffer), count=1)
        mbarrier.init(q_empty.index(buffer), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=READERS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=READERS)
    entry = gl.allocate_shared_memory(gl.int64, [ENTRIES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    entry_full, entry_empty = barriers(ENTRIES), barriers(ENTRIES)
    for number in gl.static_range(ENTRIES):
        mbarrier.init(entry_full.index(number), count=1)
        mbarrier.init(entry_empty.index(number), count=READERS)
    fence_async_shared()
    return Buffers(
        q=Ring(q_smem, q_full, q_empty, PLAN.query_buffers),
        k=Ring(k_smem, k_full, k_empty, STAGES),
        v=Ring(v_smem, v_full, v_empty, STAGES),
        lengths=lengths,
        entries=Ring(entry, entry_full, entry_empty, ENTRIES),
    )
