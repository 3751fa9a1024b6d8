"""Ray's side of a prefill group: actors, their placement, and the Serve deployment that owns them.

Importing this loads no torch; the stage actors do, in their own processes. The replica only supervises:
its children die with it, and when one of them dies its health check fails, so that Serve builds a new
group. Stages are never restarted singly: their peers would be out of step.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..messages import (
    NAMESPACE,
    PREFILL_PREFIX,
    ChunkCommand,
    ChunkReport,
    GroupStats,
    OpenRequest,
    PrefillFailed,
    PrefillJob,
    RequestFailed,
)
from ..settings import HandoffConfig, ModelSpec, PrefillConfig

if TYPE_CHECKING:
    from .request import Event
    from .stage import PrefillStage

REPLICA_CPUS = 0.1
"""What the replica asks for; its stages do the work."""
_CONTROLLER_CALLS = 1000


def placement(config: PrefillConfig) -> tuple[list[dict[str, float]], str]:
    """Placement group of one replica: bundles (0: the replica and its controller, then a stage each) and
    strategy. PACK, not STRICT_PACK: stages may need several one-GPU nodes."""
    stage = {"CPU": config.cpus_per_stage}
    if config.gpus_per_stage > 0:
        stage["GPU"] = config.gpus_per_stage
    return [{"CPU": REPLICA_CPUS}, *(dict(stage) for _ in range(config.stages))], "PACK"


COMPUTE, CONTROL = "compute", "control"
"""Concurrency groups of a stage actor, one thread each: commands in the order sent, and what overtakes them.
Every call names its group: one without would block both."""


class StageActor:
    """A `PrefillStage` in a process of its own."""

    def __init__(self, model: ModelSpec, config: PrefillConfig, stage: int) -> None:
        self._model, self._config, self._number = model, config, stage
        self._store: Any = None
        self._stage: PrefillStage | None = None

    def host(self) -> tuple[str, int]:
        """Address and port where the stages of the group find each other (first stage only)."""
        from .activations import host_store

        address = str(ray.util.get_node_ip_address())
        self._store = host_store(address, self._config.stages)
        return address, int(self._store.port)

    def load(self, rendezvous: tuple[str, int] | None) -> None:
        """Load the model's share, then meet the other stages (None: there are none)."""
        import torch

        from ..kv.transports import sender
        from .stage import load_stage

        torch.set_num_threads(self._config.threads)  # of this thread, which computes
        ends = sender(HandoffConfig(), self._config.device)
        stage = load_stage(self._model, self._config, self._number, None, ends)
        if rendezvous is not None:
            stage.connect(self._activations(rendezvous, stage))
        self._stage = stage

    def open(self, request: OpenRequest) -> None:
        self._loaded.open(request)

    def run_chunk(self, command: ChunkCommand) -> ChunkReport:
        return self._loaded.run_chunk(command)

    def close(self, request_id: str) -> None:
        self._loaded.close(request_id)

    def abandon(self, serial: int) -> None:
        self._loaded.abandon(serial)

    def pages_used(self) -> int:
        return self._loaded.pages_used()

    @property
    def _loaded(self) -> PrefillStage:
        if self._stage is None:
            raise RuntimeError(f"stage {self._number} has not loaded its model")
        return self._stage

    def _activations(self, rendezvous: tuple[str, int], stage: PrefillStage) -> Any:
        from .activations import GroupActivations, join_store

        stages, stack = self._config.stages, stage.stack
        store = self._store if self._number == 0 else join_store(*rendezvous, stages)
        return GroupActivations(store, self._number, stages, stack.config.hidden, stack.dtype, stack.device)


class RayStageLink:
    """A stage actor, as the controller sees it: Ray's errors become plain ones.

    Commands are sent outside the context of whichever call caused them. Ray would count them as that
    call's children, and `ray.cancel` of one request's stream would take commands out of the stages' queues.
    """

    def __init__(self, actor: Any, stage: int) -> None:
        self._actor = actor
        self._stage = stage
        self._context = copy_context()

    def open(self, request: OpenRequest) -> Awaitable[None]:
        return self._send(self._actor.open, request)

    def run_chunk(self, command: ChunkCommand) -> Awaitable[ChunkReport]:
        return self._send(self._actor.run_chunk, command)

    def close(self, request_id: str) -> Awaitable[None]:
        return self._send(self._actor.close, request_id)

    def abandon(self, serial: int) -> None:
        self._context.run(_in_group(self._actor.abandon, CONTROL).remote, serial)

    def pages_used(self) -> Awaitable[int]:
        return self._send(self._actor.pages_used)

    def stop(self) -> None:
        ray.kill(self._actor)

    def _send(self, method: Any, *args: Any) -> Awaitable[Any]:
        return self._outcome(self._context.run(_in_group(method, COMPUTE).remote, *args))

    async def _outcome(self, reply: Any) -> Any:
        try:
            return await reply
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(f"stage {self._stage} died") from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RequestFailed):
                raise RequestFailed(str(cause)) from error
            raise RuntimeError(f"stage {self._stage}: {type(cause).__name__}: {cause}") from error


class ControllerActor:
    """A `PrefillController` under a name that the door finds. Asyncio: calls run side by side."""

    def __init__(self, name: str, stages: Sequence[Any], config: PrefillConfig) -> None:
        from .controller import PrefillController

        links = [RayStageLink(actor, number) for number, actor in enumerate(stages)]
        self._controller = PrefillController(name, links, config)

    async def prefill(self, job: PrefillJob) -> AsyncIterator[Event]:
        events = self._controller.prefill(job)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def cancel(self, request_id: str) -> None:
        await self._controller.cancel(request_id)

    async def renew(self, request_ids: Sequence[str]) -> None:
        self._controller.renew(request_ids)

    async def stats(self) -> GroupStats:
        """Raises PrefillFailed once the group is lost, so that no door sends it anything more."""
        if self._controller.failure:
            raise PrefillFailed(self._controller.failure)
        return self._controller.stats()

    async def stage_pages(self) -> list[int]:
        """Pages that each stage holds for open requests (what the leak tests count)."""
        return await self._controller.stage_pages()

    async def check(self) -> str:
        """Why the group is dead; empty while it lives."""
        return await self._controller.check()


class PrefillGroup:
    """A Serve deployment's class: owns the actors of one group. Serve nothing through it but health.

    Deploy it with `placement(config)` and `ray_actor_options={"num_cpus": REPLICA_CPUS}`. Outside Serve
    it works the same, without a placement group; `stop()` it then. Constructing it returns when every
    stage has loaded the model. Raises what loading raises (`ModelError`), inside Ray's error.
    """

    def __init__(self, model: ModelSpec, config: PrefillConfig) -> None:
        self.name = PREFILL_PREFIX + secrets.token_hex(4)
        group = get_current_placement_group()
        self._stages = [self._start_stage(model, config, stage, group) for stage in range(config.stages)]
        rendezvous = None
        if config.stages > 1:
            rendezvous = ray.get(_in_group(self._stages[0].host, COMPUTE).remote())
        ray.get([_in_group(stage.load, COMPUTE).remote(rendezvous) for stage in self._stages])
        self.controller = (
            ray.remote(ControllerActor)
            .options(
                name=self.name,
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=0,
                max_concurrency=_CONTROLLER_CALLS,
                **_in_bundle(group, 0),
            )
            .remote(self.name, self._stages, config)
        )
        ray.get(self.controller.stats.remote())

    async def check_health(self) -> None:
        """Serve calls this; raises once the group is lost, after which Serve replaces the replica."""
        failure = await self.controller.check.remote()
        if failure:
            raise RuntimeError(failure)

    def stop(self) -> None:
        """End all actors at once (outside Serve; a replica's children die with it)."""
        for actor in [self.controller, *self._stages]:
            ray.kill(actor)

    @staticmethod
    def _start_stage(model: ModelSpec, config: PrefillConfig, stage: int, group: Any) -> Any:
        return (
            ray.remote(concurrency_groups={COMPUTE: 1, CONTROL: 1})(StageActor)
            .options(
                num_cpus=config.cpus_per_stage,
                num_gpus=config.gpus_per_stage,
                max_restarts=0,
                **_in_bundle(group, stage + 1),
            )
            .remote(model, config, stage)
        )


def _in_group(method: Any, group: str) -> Any:
    return method.options(concurrency_group=group)


def _in_bundle(group: Any, bundle: int) -> dict[str, Any]:
    if group is None:
        return {}
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)}
