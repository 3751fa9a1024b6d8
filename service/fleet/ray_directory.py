"""Finds workers as Ray actors, by name. Calls do not pass through Serve."""

import asyncio
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from deltafront.service.errors import Unavailable, WorkerError, WorkerFailed, WorkerHandoffFailed, WorkerLost
from deltafront.service.fleet.fleet import WorkerHandles
from deltafront.workers.messages.stages import HandoffFailed
from deltafront.workers.messages.states import DECODE_PREFIX, NAMESPACE, PREFILL_PREFIX
from deltafront.workers.remote import Failure, remote
from deltafront.workers.roles import DecodeWorker, Group


class RayDirectory:
    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, Any]] = {}
        """The actor's id and proxy, by name."""

    async def find(self) -> WorkerHandles:
        try:
            actors = await asyncio.to_thread(_list_actors)
        except RayError as error:
            what = f"Ray does not say which workers there are ({type(error).__name__})"
            raise Unavailable(what, retry_after_s=1.0) from error
        self._known = {name: self._known_or_new(name, actor) for name, actor in actors.items()}
        return WorkerHandles(self._named(PREFILL_PREFIX), self._named(DECODE_PREFIX))

    def _known_or_new(self, name: str, actor: Any) -> tuple[Any, Any]:
        """Return a known proxy or make a new one. A restarted worker has the same name but is another
        actor."""
        known = self._known.get(name)
        if known is not None and known[0] == actor._actor_id:
            return known
        role: Any = Group if name.startswith(PREFILL_PREFIX) else DecodeWorker
        return actor._actor_id, remote(role, name, actor, partial(worker_error, name))

    def _named(self, prefix: str) -> dict[str, Any]:
        return {name: worker for name, (_, worker) in self._known.items() if name.startswith(prefix)}


def _list_actors() -> dict[str, Any]:
    listed = ray.util.list_named_actors(all_namespaces=True)
    actors: dict[str, Any] = {}
    for name in [actor["name"] for actor in listed if actor["namespace"] == NAMESPACE]:
        if name.startswith((PREFILL_PREFIX, DECODE_PREFIX)):
            try:
                actors[name] = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:  # the worker died after it was listed
                continue
    return actors


def worker_error(worker: str, failure: Failure) -> WorkerError:
    """Translate a failure. Clients may see the message, so it names no host, path or line of code."""
    if failure.cause is None:
        return WorkerLost(worker, f"{worker} {failure.message}")
    lines = str(failure.cause).strip().splitlines()
    kind = WorkerHandoffFailed if isinstance(failure.cause, HandoffFailed) else WorkerFailed
    return kind(worker, lines[0] if lines else "the worker failed")
