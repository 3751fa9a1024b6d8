from __future__ import annotations

import os
import sys
import threading

import torch

_YIELD = 5
"""Niceness: a third of an ordinary thread's processor time."""
_LOWEST = 19


def set_up_compute_thread(threads: int, device: str) -> None:
    """Set this thread's torch threads. On a CPU, lower its priority: a refusal must not wait for a chunk's
    time slices."""
    torch.set_num_threads(threads)
    if device == "cpu" and sys.platform == "linux":  # only Linux has niceness per thread
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(nice + _YIELD, _LOWEST))
