"""Shares tensors between processes of one host: by CUDA IPC on a GPU, by shared memory on a CPU.

A mapped tensor appears on this process's device, even if Ray numbers the GPUs differently for each process.
It stays valid until it is unmapped, even after its owner has ended.
"""

import asyncio
import contextlib
import io
import logging
import os
import pickle
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

log = logging.getLogger(__name__)


class PeerMemory(Protocol):
    home: str
    """See the function `home`."""

    def export(self, x: torch.Tensor) -> Any:
        """Return a handle to send to another process. `x` must live as long as this process."""

    def open(self, handle: Any) -> torch.Tensor:
        """Map another process's tensor. It stays mapped until the last reference to it is gone.

        Raises:
            RuntimeError: The other process has ended.
        """

    def mark(self) -> Any:
        """Record a CUDA event after all work launched on the current stream, and return it; None on a CPU."""

    def when_gone(self, pid: int, on_end: Callable[[], None]) -> None:
        """Call `on_end` once, on this event loop, when a process has ended."""


class CudaPeerMemory:
    """Shares GPU memory between processes, by CUDA IPC (`PeerMemory`)."""

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
        arguments[_DEVICE_ARGUMENT] = index  # the exporter may number the GPUs differently
        opened: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
        return opened

    def mark(self) -> Any:
        return launched(self._device)

    def when_gone(self, pid: int, on_end: Callable[[], None]) -> None:
        when_gone(pid, on_end)


_DEVICE_ARGUMENT = 6
"""Position of the device's index among the arguments of `rebuild_cuda_tensor`."""


class HostPeerMemory:
    """Shares CPU memory between processes (`PeerMemory`). `export` moves a tensor's storage to shared
    memory."""

    def __init__(self) -> None:
        self.home = home()

    def export(self, x: torch.Tensor) -> Any:
        file, size = x.untyped_storage()._share_fd_cpu_()
        return os.getpid(), file, size, x.dtype, x.storage_offset(), x.shape, x.stride()

    def open(self, handle: Any) -> torch.Tensor:
        pid, file, size, dtype, *place = handle
        try:
            storage = torch.UntypedStorage.from_file(f"/proc/{pid}/fd/{file}", True, size)
        except RuntimeError as error:
            raise RuntimeError(f"process {pid}, whose memory it is, is gone") from error
        return torch.empty(0, dtype=dtype).set_(cast(torch.UntypedStorage, storage), *place)

    def mark(self) -> Any:
        return None

    def when_gone(self, pid: int, on_end: Callable[[], None]) -> None:
        when_gone(pid, on_end)


def peer_memory(device: torch.device) -> PeerMemory:
    return CudaPeerMemory(device) if device.type == "cuda" else HostPeerMemory()


def when_gone(pid: int, on_end: Callable[[], None]) -> None:
    """Call `on_end` once, on this event loop, when a process has ended."""
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


def end_process(why: str) -> None:
    """End this process at once, so that it keeps no memory mapped."""
    log.warning("%s: so does this process", why)
    os._exit(1)


def end_with(pid: int) -> None:
    """End this process when process `pid` ends, so that none of that process's memory stays mapped."""

    def wait() -> None:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(pid)], [], [])
        end_process(f"process {pid}, whose memory this one maps, has ended")

    threading.Thread(target=wait, name="end-with-owner", daemon=True).start()


@dataclass(frozen=True, kw_only=True)
class ExportedObjects:
    """Pickled objects of another process, whose tensors can be mapped.

    Attributes:
        home: The other process's host, from the function `home`.
        gpu: The UUID of its GPU; empty on a CPU.
    """

    home: str
    pid: int
    gpu: str
    pickled: bytes = field(repr=False)


def export_objects(objects: Any, device: torch.device) -> ExportedObjects:
    """Pickle objects with a handle in place of each tensor. The tensors must live as long as this process."""
    peers, buffer = peer_memory(device), io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.persistent_id = lambda x: peers.export(x) if isinstance(x, torch.Tensor) else None  # type: ignore[method-assign]
    pickler.dump(objects)
    return ExportedObjects(home=peers.home, pid=os.getpid(), gpu=_gpu(device), pickled=buffer.getvalue())


def map_objects(exported: ExportedObjects, device: torch.device | str) -> Any:
    """Unpickle objects and map their tensors. Raises RuntimeError if the tensors cannot be mapped."""
    device = torch.device(device)
    peers = peer_memory(device)
    if exported.home != peers.home:
        raise RuntimeError(
            f"it lies on another host or in another container ({exported.home}; here: {peers.home})"
        )
    if exported.gpu != _gpu(device):
        raise RuntimeError(f"it lies on another GPU ({exported.gpu}; here: {_gpu(device)})")
    unpickler = pickle.Unpickler(io.BytesIO(exported.pickled))
    unpickler.persistent_load = peers.open  # type: ignore[method-assign]
    return unpickler.load()


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def launched(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def home() -> str:
    """Return a name of this host and its PID namespace, so that two containers on one host have different
    names."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}, boot {boot}, {os.readlink('/proc/self/ns/pid')}"
