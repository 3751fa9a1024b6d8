"""A ring of shared-memory buffers that one warp fills and other warps read.

Do not import `annotations` from `__future__` here: Triton's `aggregate` checks fields against the annotated
types.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Waits for the warps of a partition. It is `thread_barrier` in Triton 3.6."""


@aggregate
class Ring:
    """A ring of COUNT buffers. Its n-th use (from 0) takes buffer FIRST + n % COUNT.

    The barrier `full` completes when a buffer has been written, `empty` when every reader has released it. A
    wait takes the parity of the completion it waits for. A new barrier counts as completed for parity 1.
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
        """Return buffers number * COUNT .. (number + 1) * COUNT - 1 as a ring."""
        return Ring(self.buffers, self.full, self.empty, self.COUNT, number * self.COUNT)

    @gluon.jit
    def buffer(self, use):
        return self.buffers.index(self.FIRST + use % self.COUNT)

    @gluon.jit
    def when_full(self, use):
        return self.full.index(self.FIRST + use % self.COUNT)

    @gluon.jit
    def wait_full(self, use):
        mbarrier.wait(self.full.index(self.FIRST + use % self.COUNT), (use // self.COUNT) & 1)

    @gluon.jit
    def wait_empty(self, use):
        """Wait, as the writer, until readers have released the previous use of this buffer."""
        mbarrier.wait(self.empty.index(self.FIRST + use % self.COUNT), ((use // self.COUNT) & 1) ^ 1)

    @gluon.jit
    def release(self, use, pred=True):
        mbarrier.arrive(self.empty.index(self.FIRST + use % self.COUNT), pred=pred)

    @gluon.jit
    def release_loaded(self, use):
        """Release a buffer that this reader read with ordinary loads. The fence orders these loads before the
        next TMA write, which uses PTX's async proxy."""
        fence_async_shared()
        barrier()
        self.release(use)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
