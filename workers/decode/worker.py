"""Ray's side of a decode worker: the actor that the door and the stages find by name, and its supervisor.

Importing this loads no torch; the actor does, in its own process.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..messages import (
    DECODE_PREFIX,
    NAMESPACE,
    DecodeStats,
    FirstLogits,
    GenerateJob,
    KeepSession,
    KVAnnouncement,
    Refused,
    Reserve,
    Reserved,
    SessionKept,
)
from ..settings import DecodeConfig, ModelSpec

if TYPE_CHECKING:
    from .engine import DecodeEngine
    from .scheduler import DecodeEvent

REPLICA_CPUS = 0.1
"""What the replica asks for; its actor does the work."""
_CALLS = 1000
"""Calls that may be under way at once: every stream is one."""


def placement(config: DecodeConfig) -> tuple[list[dict[str, float]], str]:
    """Placement group of one replica: bundles (0: the replica, 1: the actor) and strategy."""
    worker = {"CPU": config.cpus}
    if config.gpus > 0:
        worker["GPU"] = config.gpus
    return [{"CPU": REPLICA_CPUS}, worker], "PACK"


class DecodeActor:
    """A `DecodeEngine` in a process of its own. Asyncio: calls run side by side, and wait for loading."""

    def __init__(self, name: str, model: ModelSpec, config: DecodeConfig) -> None:
        from .engine import load_engine

        self._engine: DecodeEngine = load_engine(name, model, config)

    async def start(self) -> None:
        await self._engine.start()

    async def reserve(self, order: Reserve) -> Reserved | Refused:
        return await self._engine.reserve(order)

    async def announce(self, announcement: KVAnnouncement) -> None:
        await self._engine.announce(announcement)

    async def first_logits(self, message: FirstLogits) -> None:
        await self._engine.first_logits(message)

    async def generate(self, job: GenerateJob) -> AsyncIterator[DecodeEvent]:
        events = self._engine.generate(job)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def keep(self, job: KeepSession) -> SessionKept | Refused:
        return await self._engine.keep(job)

    async def cancel(self, request_id: str) -> None:
        await self._engine.cancel(request_id)

    async def release_session(self, session_id: str, owner: str) -> bool:
        return await self._engine.release_session(session_id, owner)

    async def renew(self, request_ids: Sequence[str]) -> None:
        await self._engine.renew(request_ids)

    async def stats(self) -> DecodeStats:
        return await self._engine.stats()

    async def check(self) -> str:
        """Why the worker should be replaced; empty while it is well."""
        return self._engine.fault


class DecodeReplica:
    """A Serve deployment's class: owns one decode actor. Serve nothing through it but health.

    Deploy it with `placement(config)` and `ray_actor_options={"num_cpus": REPLICA_CPUS}`. Outside Serve
    it works the same, without a placement group; `stop()` it then. Constructing it returns when the model
    is loaded. Raises what loading raises (`ModelError`, `SelectionError`), inside Ray's error.
    """

    def __init__(self, model: ModelSpec, config: DecodeConfig) -> None:
        self.name = DECODE_PREFIX + secrets.token_hex(4)
        group = get_current_placement_group()
        where = {} if group is None else {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, 1)}
        self.actor: Any = (
            ray.remote(DecodeActor)
            .options(
                name=self.name,
                namespace=NAMESPACE,
                num_cpus=config.cpus,
                num_gpus=config.gpus,
                max_restarts=0,
                max_concurrency=_CALLS,
                **where,
            )
            .remote(self.name, model, config)
        )
        ray.get(self.actor.start.remote())

    async def check_health(self) -> None:
        """Serve calls this; raises once the actor is dead or broken, after which Serve replaces both."""
        fault = await self.actor.check.remote()
        if fault:
            raise RuntimeError(fault)

    def stop(self) -> None:
        """End the actor at once (outside Serve; a replica's actor dies with it)."""
        ray.kill(self.actor)
