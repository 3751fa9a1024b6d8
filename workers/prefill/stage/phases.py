"""Times a chunk's phases without slowing the chunk down.

Phases nest: the Δ correction runs a whole method inside. Time counts only for the innermost phase, and for
the layer that was current when that phase began. So phases are disjoint and lie within the chunk.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

_Key = tuple[str, int | None]


class PhaseTimer:
    """Times one chunk by the wall clock of the calling thread. `phase` fits `kernels.interface.Phase`."""

    def __init__(self) -> None:
        self.layer: int | None = None
        """The layer of phases that begin now, if any."""
        self._stack: list[_Key] = []
        self._moments: list[tuple[Any, _Key | None]] = []
        """Points in time, each with the phase that ended there."""
        self._seconds: defaultdict[_Key, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._begin()
        self._stack.append((name, self.layer))
        try:
            yield
        finally:
            self._record()
            self._stack.pop()

    def mark(self) -> Any:
        """Record a CUDA event after everything launched so far. Waiting for it does not spin. None on a
        CPU.
        """

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase, once, after the last phase. On CUDA it waits for the device."""
        totals: defaultdict[str, float] = defaultdict(float)
        for (before, _), (after, key) in pairwise(self._moments):
            if key is not None:
                self._seconds[key] += self._between(before, after)
        for (name, _layer), spent in self._seconds.items():
            totals[name] += spent
        return dict(totals)

    def layers(self) -> dict[int, dict[str, float]]:
        """Return the seconds of each layer's phases. Call it after `seconds`."""
        layers: dict[int, dict[str, float]] = {}
        for (name, layer), spent in self._seconds.items():
            if layer is not None:
                layers.setdefault(layer, {})[name] = spent
        return layers

    def _begin(self) -> None:
        self._record()

    def _record(self) -> None:
        self._moments.append((self._now(), self._stack[-1] if self._stack else None))

    def _now(self) -> Any:
        return time.perf_counter()

    def _between(self, before: Any, after: Any) -> float:
        return float(after - before)


class CudaPhases(PhaseTimer):
    """Times one chunk by device time between events on the current stream. Only `seconds` waits for them.

    One event ends a phase and begins the next, because an event costs the host as much as a small launch.
    Launches between two phases count for the later one. The time of a phase with only host work is the time
    for which the stream was idle.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stream = torch.cuda.current_stream()  # asking again at every mark takes longer than the mark

    def mark(self) -> Any:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def seconds(self) -> dict[str, float]:
        if self._moments:
            self._moments[-1][0].synchronize()
        return super().seconds()

    def _begin(self) -> None:
        if self._stack or not self._moments:  # else the event that ended the last phase begins this one
            self._record()

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _between(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) / 1e3


def phase_timer(device: torch.device) -> PhaseTimer:
    return CudaPhases() if device.type == "cuda" else PhaseTimer()
