"""Times a chunk's phases without slowing the chunk down.

Phases nest: the Δ correction runs a whole method inside. Time counts for the innermost phase alone, and
for the layer that was current when it began. So phases are disjoint and lie within the chunk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class PhaseTimer(Protocol):
    """One chunk's timer; `phase` fits `kernels.interface.Phase`."""

    layer: int | None
    """The layer of phases that begin now, if any."""

    def phase(self, name: str) -> AbstractContextManager[object]: ...

    def mark(self) -> Any:
        """Return a CUDA event after everything launched so far, waited for without spinning; None on the
        CPU."""

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase, once, after the last phase. On CUDA it waits for the device."""

    def layers(self) -> dict[int, dict[str, float]]:
        """Return the seconds of each layer's phases. Call it after `seconds`."""


_Key = tuple[str, int | None]


def _by_phase(seconds: Mapping[_Key, float]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for (name, _layer), spent in seconds.items():
        totals[name] = totals.get(name, 0.0) + spent
    return totals


def _by_layer(seconds: Mapping[_Key, float]) -> dict[int, dict[str, float]]:
    layers: dict[int, dict[str, float]] = {}
    for (name, layer), spent in seconds.items():
        if layer is not None:
            layers.setdefault(layer, {})[name] = spent
    return layers


class CpuPhases:
    """Wall-clock time of the calling thread."""

    def __init__(self) -> None:
        self.layer: int | None = None
        self._seconds: dict[_Key, float] = {}
        self._stack: list[_Key] = []
        self._mark = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._credit()
        self._stack.append((name, self.layer))
        try:
            yield
        finally:
            self._credit()
            self._stack.pop()

    def mark(self) -> None: ...

    def seconds(self) -> dict[str, float]:
        return _by_phase(self._seconds)

    def layers(self) -> dict[int, dict[str, float]]:
        return _by_layer(self._seconds)

    def _credit(self) -> None:
        now = time.perf_counter()
        if self._stack:
            key = self._stack[-1]
            self._seconds[key] = self._seconds.get(key, 0.0) + now - self._mark
        self._mark = now


class CudaPhases:
    """Device time between events on the current stream. Only `seconds` waits for them.

    One event ends a phase and begins the next, because an event costs the host as much as a small launch.
    Launches between two phases count for the later one. A phase in which only the host works shows how long
    the stream was idle.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()  # asking again at every mark takes longer than the mark
        self.layer: int | None = None
        self._seconds: dict[_Key, float] = {}
        self._stack: list[_Key] = []
        self._marks: list[tuple[torch.cuda.Event, _Key | None]] = []
        """Events, each with the phase of the time before it."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._stack or not self._marks:  # else the event that ended the phase before stands here
            self._record()
        self._stack.append((name, self.layer))
        try:
            yield
        finally:
            self._record()
            self._stack.pop()

    def mark(self) -> Any:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def seconds(self) -> dict[str, float]:
        if self._marks:
            self._marks[-1][0].synchronize()
        for (before, _), (after, key) in zip(self._marks, self._marks[1:], strict=False):
            if key is not None:
                self._seconds[key] = self._seconds.get(key, 0.0) + before.elapsed_time(after) / 1e3
        return _by_phase(self._seconds)

    def layers(self) -> dict[int, dict[str, float]]:
        return _by_layer(self._seconds)

    def _record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._marks.append((event, self._stack[-1] if self._stack else None))


def phase_timer(device: torch.device) -> PhaseTimer:
    return CudaPhases() if device.type == "cuda" else CpuPhases()
