"""What Triton compiles in this process, and when: before the worker was ready, or while requests waited.

A form of a kernel that is found in the cache on disk counts like one that is compiled: loading it also stops
a request, for less time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


Phases = tuple[tuple[str, int], ...]
"""Forms of kernels made, by phase."""


@dataclass
class Compilations:
    """Forms of kernels made so far. ready: from now on they are made while requests may wait."""

    warm_up: int = 0
    serving: int = 0
    ready: bool = False

    def count(self, name: str, seconds: float, loaded: bool) -> None:
        """One was made in `seconds`; loaded: from disk."""
        if not self.ready:
            self.warm_up += 1
            return
        self.serving += 1
        how = "loaded from disk" if loaded else "compiled"
        log.warning("kernel %s was %s in %.3f s while requests may wait", name, how, seconds)

    @property
    def phases(self) -> Phases:
        return ("warm_up", self.warm_up), ("serving", self.serving)


def added_up(several: Iterable[Phases]) -> Phases:
    """Of several processes."""
    total: Counter[str] = Counter()
    for phases in several:
        total.update(dict(phases))
    return tuple(total.items())


def watch(device: str, cache: str | None = None) -> Compilations:
    """Count from now on, in this process, if the device has something compiled, and keep what is made in the
    directory `cache` (None: where Triton does). Whoever listens to Triton already is still told."""
    if not device.startswith("cuda"):
        return Compilations()
    import triton

    if cache is not None:
        triton.knobs.cache.dir = cache
    counted, knobs = Compilations(), triton.knobs.compilation
    before = knobs.listener

    def made(*, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
        counted.count(str(src.name), times.total / 1e6, cache_hit)
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **more)

    knobs.listener = made
    return counted
