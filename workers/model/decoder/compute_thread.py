"""The threads that compute, beside those that answer."""

from __future__ import annotations

import os
import sys
import threading

import torch

_YIELD = 5
"""Steps of niceness; at the kernel's weights about a third of the processor time of who has none."""
_LOWEST = 19


def set_up_compute_thread(threads: int, device: str) -> None:
    """Call it on a thread that computes: torch takes so many of this thread's own. On a CPU they yield to
    what answers on the same cores, doors and controllers and the event loop of this process, or a refusal
    of a millisecond waits until a chunk's time slices are over."""
    torch.set_num_threads(threads)
    if device == "cpu" and sys.platform == "linux":  # elsewhere a thread has no niceness of its own
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(nice + _YIELD, _LOWEST))
