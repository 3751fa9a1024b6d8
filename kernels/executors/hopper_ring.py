"""Buffers in shared memory that one warp fills and others read, in turns. See `flash_hopper.py`.

Without `from __future__ import annotations`: an aggregate checks its fields against what annotates them.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from .hopper_plan import GROUP_ROWS, TILE

ENTRIES = gl.constexpr(2)
"""Buffers for the number of the next item."""


@aggregate
class Ring:
    """COUNT buffers, from number FIRST on: use n (from 0) is of buffer FIRST + n % COUNT.

    full and empty hold a barrier for each buffer. In each of its uses, a buffer's full completes when the
    buffer has been written, its empty when every reader has released it. A wait names the parity of the
    completion it waits for; a new barrier is as if one of odd parity were over, so that the first COUNT uses
    find their buffers empty.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    COUNT: gl.constexpr
    FIRST: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, count, first=0):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.COUNT = gl.constexpr(count)
        self.FIRST = gl.constexpr(first)

    @gluon.jit
    def part(self, number):
        """The number-th run of COUNT buffers, a ring of its own."""
        return Ring(self.buffers, self.full, self.empty, self.COUNT, number * self.COUNT)

    @gluon.jit
    def buffer(self, use):
        return self.buffers.index(self.FIRST + use % self.COUNT)

    @gluon.jit
    def when_full(self, use):
        """The barrier that completes when this use's buffer has been written."""
        return self.full.index(self.FIRST + use % self.COUNT)

    @gluon.jit
    def wait_full(self, use):
        """A reader's wait."""
        mbarrier.wait(self.full.index(self.FIRST + use % self.COUNT), (use // self.COUNT) & 1)

    @gluon.jit
    def wait_empty(self, use):
        """The writer's wait, for the readers of the buffer's use before this one."""
        mbarrier.wait(self.empty.index(self.FIRST + use % self.COUNT), ((use // self.COUNT) & 1) ^ 1)

    @gluon.jit
    def release(self, use, pred=True):
        """One reader's word that it has done with this use's buffer."""
        mbarrier.arrive(self.empty.index(self.FIRST + use % self.COUNT), pred=pred)

    @gluon.jit
    def release_loaded(self, use):
        """`release` of a reader that has loaded what was copied, itself and not by the matrix unit. The copy
        engine writes by another way (PTX: the async proxy) and overtakes loads that are under way, whatever
        barriers their threads have passed; the fence waits for them."""
        fence_async_shared()
        gl.thread_barrier()
        self.release(use)


class Buffers(NamedTuple):
    """Everything in shared memory. The copying warp writes it.

    q, (1, 1, 64, D) a buffer: queries. Each warpgroup reads, and puts its output into, a part of its own.
    k and v, (1, 1, 128, D): tiles of keys and of values, which every warpgroup reads.
    lengths, (1, 1, 128) float32: (PACKED) run lengths of k's keys, full and empty when their keys are.
    entries, (1,) int64: the item that comes next, see `hopper_tiles.py`.
    """

    q: Ring
    k: Ring
    v: Ring
    lengths: gl.shared_memory_descriptor
    entries: Ring


@gluon.jit
def barriers(COUNT: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def new_buffers(q, k, v, weight, PLAN: gl.constexpr):
    """All shared memory, with the barriers ready. q, k, v, weight: descriptors of what is copied into it."""
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
