"""Buffers in shared memory that one warp fills and others read, in turns. See `flash_hopper.py`.

Without `from __future__ import annotations`: an aggregate checks its fields against what annotates them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate


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


@gluon.jit
def barriers(COUNT: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
