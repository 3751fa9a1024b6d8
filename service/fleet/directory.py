"""How a door finds workers.

Any object with a role of `workers/roles.py` is one. Its calls raise WorkerLost or WorkerFailed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...workers.roles import DecodeWorker, Group


@dataclass(frozen=True)
class WorkerHandles:
    """Workers by actor name."""

    groups: Mapping[str, Group]
    workers: Mapping[str, DecodeWorker]


class Directory(Protocol):
    async def find(self) -> WorkerHandles: ...
