"""Copies weights from memory-mapped files to a GPU through pinned buffers.

One thread reads mapped memory far more slowly than storage and PCIe allow. Several threads are therefore
used, each with two pinned buffers: it fills one while the other is copied to the GPU.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Made = TypeVar("Made")

THREADS = min(8, os.cpu_count() or 1)
_BUFFER_BYTES = 32 << 20
Buffer = tuple[torch.Tensor, Any]
"""Pinned memory, and the CUDA event after which it may be filled again."""


class Uploads:
    """Copies tensors to a device, on its current stream. Several threads may call `copy` at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a tensor. `target` must be contiguous and on the device."""
        if self._device.type != "cuda" or source.dtype != target.dtype:
            target.copy_(source)
            return
        source_B = source.contiguous().view(-1).view(torch.uint8)
        target_B = target.view(-1).view(torch.uint8)
        for start in range(0, source_B.numel(), _BUFFER_BYTES):
            buffer_B, left = self._next_buffer()
            left.synchronize()
            part_B = source_B[start : start + _BUFFER_BYTES]
            filled_B = buffer_B[: part_B.numel()].copy_(part_B)
            target_B[start : start + _BUFFER_BYTES].copy_(filled_B, non_blocking=True)
            left.record(torch.cuda.current_stream(self._device))

    def _next_buffer(self) -> Buffer:
        if not hasattr(self._own, "turn"):
            self._own.turn = deque(_pinned() for _ in range(2))
        self._own.turn.rotate()
        buffer: Buffer = self._own.turn[0]
        return buffer


def _pinned() -> Buffer:
    event: Any = torch.cuda.Event  # untyped in torch
    return torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), event()


def in_threads(make: Callable[[Item], Made], items: Iterable[Item], threads: int) -> Iterator[Made]:
    """Compute make(item) in threads, and yield the results in order. At most `threads` + 1 items are computed
    before the caller takes the next result."""
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[Made]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(make, item))
                if len(pending) > threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
