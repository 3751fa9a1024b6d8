"""Times a chunk's phases without slowing the chunk down.

Phases nest, because the Δ correction runs a whole method inside. Time counts only for the innermost phase,
and for the layer that was current when that phase began. Phases are therefore disjoint.
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
    """Times one chunk by the calling thread's wall clock. `phase` implements `kernels.interface.Phase`."""

    def __init__(self) -> None:
        self.layer: int | None = None
        """The layer for which new phases count; None outside layers."""
        self._stack: list[_Key] = []
        self._moments: list[tuple[Any, _Key | None]] = []
        """Times or CUDA events, each with the phase that ended then."""
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
        """Record a CUDA event after everything launched so far; on a CPU, return None. A host thread that
        waits for the event sleeps."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase. Call it once, after the last phase. On CUDA it waits for the
        device."""
        totals: defaultdict[str, float] = defaultdict(float)
        for (before, _), (after, key) in pairwise(self._moments):
            if key is not None:
                self._seconds[key] += self._between(before, after)
        for (name, _layer), spent in self._seconds.items():
            totals[name] += spent
        return dict(totals)

    def layers(self) -> dict[int, dict[str, float]]:
        """Return the seconds of each phase by layer. Call it after `seconds`."""
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
    """Times one chunk by CUDA events on the current stream. Only `seconds` waits for the events.

    One event both ends a phase and begins the next, because recording an event takes the host as long as a
    small launch. Work launched between two phases counts for the later one. A phase without launches gets the
    time for which the stream was idle.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stream = torch.cuda.current_stream()  # the call takes longer than recording an event

    def mark(self) -> Any:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def seconds(self) -> dict[str, float]:
        if self._moments:
            self._moments[-1][0].synchronize()
        return super().seconds()

    def _begin(self) -> None:
        if self._stack or not self._moments:  # else the last phase's end event also begins this phase
            self._record()

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _between(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) / 1e3


def phase_timer(device: torch.device) -> PhaseTimer:
    return CudaPhases() if device.type == "cuda" else PhaseTimer()
