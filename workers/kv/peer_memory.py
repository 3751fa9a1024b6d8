"""GPU memory that other processes of this host can read: CUDA IPC.

A process sees mapped memory as its own device's, whichever GPUs Ray shows it. Mapped memory outlives its
owner until it is unmapped.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor


class PeerMemory(Protocol):
    home: str
    """See `home`."""

    def export(self, x: torch.Tensor) -> Any:
        """Return a handle that can be sent. x must live as long as this process."""

    def open(self, handle: Any) -> torch.Tensor:
        """Map another process's tensor until its last reference goes. Raises RuntimeError if its owner is
        gone."""

    def mark(self) -> Any:
        """Return an event after all that was launched; None: it is done."""

    def when_gone(self, pid: int, on_end: Callable[[], None]) -> None:
        """Call `on_end` once, on this event loop, when a process has ended."""


class CudaPeerMemory:
    """Raises ValueError for a CPU."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"CUDA IPC needs a GPU, not {device}")
        self._device = device
        self.home = home()

    def export(self, x: torch.Tensor) -> Any:
        return reduce_tensor(x)[1]  # type: ignore[no-untyped-call]

    def open(self, handle: Any) -> torch.Tensor:
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        arguments = [*handle]
        arguments[_DEVICE_ARGUMENT] = index  # the exporter's number means nothing here
        opened: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
        return opened

    def mark(self) -> Any:
        return launched(self._device)

    def when_gone(self, pid: int, on_end: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            loop.call_soon(on_end)
            return

        def ended() -> None:
            loop.remove_reader(watched)
            os.close(watched)
            on_end()

        loop.add_reader(watched, ended)


_DEVICE_ARGUMENT = 6
"""The device's number among `rebuild_cuda_tensor`'s arguments."""


def launched(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def home() -> str:
    """Name this host and its space of process ids: two containers of one host have two names."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}, boot {boot}, {os.readlink('/proc/self/ns/pid')}"
