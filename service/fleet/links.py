"""How the door finds workers: their roles are `workers/roles.py`'s, the Ray form is in `dispatch.py`.

Any object that plays a role is an in-process worker; `LocalDirectory` finds those. Every call raises
WorkerLost when the worker is gone, and WorkerFailed when it says that the request failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...workers.roles import DecodeWorker, Group


@dataclass(frozen=True)
class Found:
    groups: Mapping[str, Group]
    workers: Mapping[str, DecodeWorker]


class Directory(Protocol):
    """Finds workers, by actor name."""

    async def find(self) -> Found: ...


class LocalDirectory:
    """Workers of this process, for tests and for running without Ray."""

    def __init__(self, groups: Sequence[Group], workers: Sequence[DecodeWorker]) -> None:
        self.groups = list(groups)
        self.workers = list(workers)

    async def find(self) -> Found:
        return Found({g.name: g for g in self.groups}, {w.name: w for w in self.workers})
