"""Workers as Ray actors: found by name in Deltafront's namespace, called without Serve in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from ...workers.messages import (
    DECODE_PREFIX,
    NAMESPACE,
    PREFILL_PREFIX,
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
from ..errors import WorkerError, WorkerFailed, WorkerLost
from .links import Found


class _Actor:
    """One actor handle; turns Ray's errors into WorkerLost and WorkerFailed."""

    def __init__(self, name: str, handle: Any) -> None:
        self._name = name
        self.handle = handle

    @property
    def name(self) -> str:
        return self._name

    async def cancel(self, request_id: str) -> None:
        await self._call("cancel", request_id)

    async def renew(self, request_ids: Sequence[str]) -> None:
        await self._call("renew", tuple(request_ids))

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self.handle, method).remote(*arguments)
        except RayError as error:
            raise self._translated(error) from None

    async def _stream(self, method: str, *arguments: Any) -> AsyncIterator[Any]:
        try:
            async for reference in (
                getattr(self.handle, method).options(num_returns="streaming").remote(*arguments)
            ):
                yield await reference
        except RayError as error:
            raise self._translated(error) from None

    def _translated(self, error: RayError) -> WorkerError:
        """What is shown to a client names no host, path or line of code."""
        if isinstance(error, RayActorError):
            return WorkerLost(self._name, f"{self._name} died")
        if isinstance(error, RayTaskError):
            cause = error.cause if isinstance(error.cause, BaseException) else error
            lines = str(cause).strip().splitlines()
            return WorkerFailed(self._name, lines[0] if lines and cause is not error else "the worker failed")
        return WorkerLost(self._name, f"{self._name} cannot be reached ({type(error).__name__})")


class GroupActor(_Actor):
    """A prefill group's controller (`GroupLink`)."""

    def prefill(self, job: PrefillJob) -> AsyncIterator[Progress | PrefillDone | Refused]:
        return self._stream("prefill", job)

    async def stats(self) -> GroupStats:
        stats: GroupStats = await self._call("stats")
        return stats


class DecodeActor(_Actor):
    """A decode worker (`DecodeLink`)."""

    async def reserve(self, reserve: Reserve) -> Reserved | Refused:
        answer: Reserved | Refused = await self._call("reserve", reserve)
        return answer

    def generate(self, job: GenerateJob) -> AsyncIterator[FirstTokenTimings | Token | FinishEvent]:
        return self._stream("generate", job)

    async def keep(self, keep: KeepSession) -> SessionKept | Refused:
        answer: SessionKept | Refused = await self._call("keep", keep)
        return answer

    async def release_session(self, session_id: str, owner: str) -> bool:
        return bool(await self._call("release_session", session_id, owner))

    async def stats(self) -> DecodeStats:
        stats: DecodeStats = await self._call("stats")
        return stats


class RayDirectory:
    """Finds worker actors by their names' prefixes. A handle is kept until its actor's name is gone."""

    def __init__(self) -> None:
        self._groups: dict[str, GroupActor] = {}
        self._workers: dict[str, DecodeActor] = {}

    async def find(self) -> Found:
        names, handles = await asyncio.to_thread(self._look)
        self._groups = {n: self._group(n, handles[n]) for n in names if n.startswith(PREFILL_PREFIX)}
        self._workers = {n: self._worker(n, handles[n]) for n in names if n.startswith(DECODE_PREFIX)}
        return Found(self._groups, self._workers)

    def _look(self) -> tuple[list[str], dict[str, Any]]:
        listed = ray.util.list_named_actors(all_namespaces=True)
        wanted = [one["name"] for one in listed if one["namespace"] == NAMESPACE]
        handles: dict[str, Any] = {}
        for name in wanted:
            if name.startswith((PREFILL_PREFIX, DECODE_PREFIX)):
                try:
                    handles[name] = ray.get_actor(name, namespace=NAMESPACE)
                except ValueError:  # died since it was listed
                    continue
        return list(handles), handles

    def _group(self, name: str, handle: Any) -> GroupActor:
        known = self._groups.get(name)
        return known if known is not None and _same(known.handle, handle) else GroupActor(name, handle)

    def _worker(self, name: str, handle: Any) -> DecodeActor:
        known = self._workers.get(name)
        return known if known is not None and _same(known.handle, handle) else DecodeActor(name, handle)


def _same(one: Any, other: Any) -> bool:
    """A restarted worker has the same name but is another actor."""
    return bool(one._actor_id == other._actor_id)
