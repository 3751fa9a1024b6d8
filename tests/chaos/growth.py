"""Detects growing processes by samples of their memory and file descriptors. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MEMORY_SHARE = 0.05
_MEMORY_BYTES = 16 << 20
_DESCRIPTORS = 8


@dataclass(frozen=True)
class Sample:
    """A sample of a process: resident bytes and open file descriptors."""

    pid: int
    title: str
    at: float
    resident: int
    descriptors: int


def grown(samples: Iterable[Sample], after: float) -> list[str]:
    """Return the processes that have grown since `after`: the median of their last third of samples exceeds
    that of the first third by 5% and 16 MiB, or by 8 descriptors."""
    by_process: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.at >= after:
            by_process.setdefault(sample.pid, []).append(sample)
    return [said for those in by_process.values() for said in _grown(those)]


def _grown(those: Sequence[Sample]) -> list[str]:
    third = len(those) // 3
    if not third:
        return []
    first, last = those[:third], those[-third:]
    memory = [statistics.median(one.resident for one in part) for part in (first, last)]
    files = [statistics.median(one.descriptors for one in part) for part in (first, last)]
    said = []
    if memory[1] - memory[0] > max(_MEMORY_SHARE * memory[0], _MEMORY_BYTES):
        said.append(f"{those[0].title}: {memory[0] / 2**20:.0f} to {memory[1] / 2**20:.0f} MiB")
    if files[1] - files[0] > _DESCRIPTORS:
        said.append(f"{those[0].title}: {files[0]:g} to {files[1]:g} file descriptors")
    return said
