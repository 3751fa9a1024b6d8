"""How the door talks to workers: small protocols, with the Ray form in `dispatch.py`.

Any object with these methods is an in-process worker; `LocalDirectory` finds those.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...workers.messages import (
    DecodeStats,
    FinishEvent,
    FirstTokenTimings,
    GenerateJob,
    GroupStats,
    KeepSession,
    PrefillDone,
    PrefillJob,
    Progress,
    Refused,
    Reserve,
    Reserved,
    SessionKept,
    Token,
)


class Leased(Protocol):
    """What both kinds of workers do. Every call raises WorkerLost when the worker is gone."""

    @property
    def name(self) -> str:
        """The actor's name."""

    async def cancel(self, request_id: str) -> None: ...

    async def renew(self, request_ids: Sequence[str]) -> None: ...


class GroupLink(Leased, Protocol):
    """A prefill group's controller."""

    def prefill(self, job: PrefillJob) -> AsyncIterator[Progress | PrefillDone | Refused]: ...

    async def stats(self) -> GroupStats: ...


class DecodeLink(Leased, Protocol):
    """A decode worker."""

    async def reserve(self, reserve: Reserve) -> Reserved | Refused: ...

    def generate(self, job: GenerateJob) -> AsyncIterator[FirstTokenTimings | Token | FinishEvent]: ...

    async def keep(self, keep: KeepSession) -> SessionKept | Refused: ...

    async def release_session(self, session_id: str, owner: str) -> bool: ...

    async def stats(self) -> DecodeStats: ...


@dataclass(frozen=True)
class Found:
    groups: Mapping[str, GroupLink]
    workers: Mapping[str, DecodeLink]


class Directory(Protocol):
    """Finds workers, by actor name."""

    async def find(self) -> Found: ...


class LocalDirectory:
    """Workers of this process, for tests and for running without Ray."""

    def __init__(self, groups: Sequence[GroupLink], workers: Sequence[DecodeLink]) -> None:
        self.groups = list(groups)
        self.workers = list(workers)

    async def find(self) -> Found:
        return Found({g.name: g for g in self.groups}, {w.name: w for w in self.workers})
