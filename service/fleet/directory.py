"""How the door finds workers: their roles are `workers/roles.py`'s, the Ray form is in `ray_directory.py`.

Any object that plays a role is a worker, in this process too. Every call raises WorkerLost when the worker is
gone, and WorkerFailed when it says that the request failed.
"""

from __future__ import annotations

from collections.abc import Mapping
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
