"""Counts the kernels that Triton compiles or loads from its disk cache, during warm-up and while serving."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


Phases = tuple[tuple[str, int], ...]


@dataclass
class Compilations:
    """Counts the kernels that a process compiles or loads. Each compilation or load after `ready` is logged,
    since requests may wait for it."""

    warm_up: int = 0
    serving: int = 0
    ready: bool = False

    def count(self, name: str, seconds: float, loaded: bool) -> None:
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
    """Sum the compilation counts of several processes, separately for warm-up and serving."""
    total: Counter[str] = Counter()
    for phases in several:
        total.update(dict(phases))
    return tuple(total.items())


def watch(device: str, cache: str | None = None) -> Compilations:
    """Start counting compilations. On a CPU the counts stay 0.

    Args:
        cache: Triton's cache directory. None: its default.
    """
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
