"""A directory of workers in this process, without Ray."""

from __future__ import annotations

from collections.abc import Sequence

from deltafront.service.fleet.fleet import WorkerHandles
from deltafront.workers.roles import DecodeWorker, Group


class LocalDirectory:
    def __init__(self, groups: Sequence[Group], workers: Sequence[DecodeWorker]) -> None:
        self.groups = list(groups)
        self.workers = list(workers)

    async def find(self) -> WorkerHandles:
        return WorkerHandles({g.name: g for g in self.groups}, {w.name: w for w in self.workers})
