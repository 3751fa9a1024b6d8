"""Finds workers as Ray actors, by name. Calls do not pass through Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic

import ray

from ...workers.messages.stages import HandoffFailed
from ...workers.messages.states import DECODE_PREFIX, NAMESPACE, PREFILL_PREFIX
from ...workers.remote import Failure, remote
from ...workers.roles import DecodeWorker, Group, Role
from ..errors import WorkerError, WorkerFailed, WorkerHandoffFailed, WorkerLost
from .directory import WorkerHandles


class RayDirectory:
    def __init__(self) -> None:
        self._groups = _Actors(Group, PREFILL_PREFIX)
        self._workers = _Actors(DecodeWorker, DECODE_PREFIX)

    async def find(self) -> WorkerHandles:
        actors = await asyncio.to_thread(_list_actors)
        return WorkerHandles(self._groups.select(actors), self._workers.select(actors))


class _Actors(Generic[Role]):
    def __init__(self, role: Callable[..., Role], prefix: str) -> None:
        self._role = role
        self._prefix = prefix
        self._known: dict[str, tuple[Any, Role]] = {}

    def select(self, actors: Mapping[str, Any]) -> dict[str, Role]:
        self._known = {
            name: self._known_or_new(name, actor)
            for name, actor in actors.items()
            if name.startswith(self._prefix)
        }
        return {name: worker for name, (_, worker) in self._known.items()}

    def _known_or_new(self, name: str, actor: Any) -> tuple[Any, Role]:
        """A restarted worker has the same name but is another actor."""
        known = self._known.get(name)
        if known is not None and known[0] == actor._actor_id:
            return known
        return actor._actor_id, remote(self._role, name, actor, partial(worker_error, name))


def _list_actors() -> dict[str, Any]:
    listed = ray.util.list_named_actors(all_namespaces=True)
    actors: dict[str, Any] = {}
    for name in [actor["name"] for actor in listed if actor["namespace"] == NAMESPACE]:
        if name.startswith((PREFILL_PREFIX, DECODE_PREFIX)):
            try:
                actors[name] = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:  # it died since it was listed
                continue
    return actors


def worker_error(worker: str, failure: Failure) -> WorkerError:
    """Clients may see the message, so it names no host, path or line of code."""
    if failure.cause is None:
        return WorkerLost(worker, f"{worker} {failure.message}")
    lines = str(failure.cause).strip().splitlines()
    kind = WorkerHandoffFailed if isinstance(failure.cause, HandoffFailed) else WorkerFailed
    return kind(worker, lines[0] if lines else "the worker failed")
