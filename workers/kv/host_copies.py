"""Copies a stage's KV to host memory, from where an outbox sends it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deltafront.workers.kv.cache import Sides

NUMPY_TYPES: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
}
MESSAGE_BYTES = 4 << 20


class HostCopies:
    """Copies KV to host memory, and makes messages of the copies (`stream.KVExporter` and `KVExport`).

    A message contains each layer's KV as host arrays. On a GPU, a separate stream copies KV into pinned
    memory while the layer is computed.
    """

    message_bytes = MESSAGE_BYTES
    in_place = False

    def __init__(self, device: torch.device | str) -> None:
        cuda = torch.device(device).type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def export(self, pages: Sequence[int]) -> HostCopies:
        return self

    def layer(self, start: int, sides_T: Sides) -> tuple[Sides, Any]:
        if self._stream is None:
            return tuple(x.detach().contiguous() for x in sides_T), None
        self._stream.wait_stream(torch.cuda.current_stream(sides_T[0].device))
        with torch.cuda.stream(self._stream):
            copies = []
            for x in sides_T:
                x.record_stream(self._stream)
                host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
                copies.append(host.copy_(x.detach(), non_blocking=True))
            landed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            landed.record(self._stream)
        return tuple(copies), landed

    def payload(self, layers: Sequence[Sides]) -> tuple[Any, ...]:
        return tuple(as_numpy(x) for sides_T in layers for x in sides_T)

    def revoke(self) -> bool:
        """Return True: decode workers read copies, never the stage's pages."""
        return True


def as_tensor(array: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that shares memory with an array from `as_numpy`.

    Raises:
        ValueError: The array has another shape or dtype.
    """
    expected = np.dtype(NUMPY_TYPES[dtype])
    if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != expected:
        received = f"{getattr(array, 'dtype', type(array).__name__)} {getattr(array, 'shape', '')}"
        raise ValueError(f"{received}, not {expected} {shape}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # arrays from the object store are read-only
        x = torch.from_numpy(array)
    return x.view(dtype) if dtype == torch.bfloat16 else x


def as_numpy(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return an array that shares memory with a host tensor; bfloat16 becomes uint16."""
    array: np.ndarray[Any, Any] = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return array
