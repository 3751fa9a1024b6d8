"""A prefill group in Ray: its actors, and the Serve deployment that owns them. It imports no torch.

When one stage is lost, the others keep their weights and form a new group with a new stage. The old group
cannot continue, because the new stage would not be in step with the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from deltafront.kernels.compilations import Compilations, Phases, added_up, watch
from deltafront.workers.leaving import Leaving
from deltafront.workers.messages.stages import HandoffFailed, Rendezvous, RequestFailed
from deltafront.workers.messages.states import DECODE_PREFIX, NAMESPACE, PREFILL_PREFIX, GroupStats
from deltafront.workers.prefill.group.chunks import ModelWork
from deltafront.workers.prefill.group.controller import PrefillController
from deltafront.workers.progress import Tell, progress
from deltafront.workers.remote import (
    COMMANDS,
    NOTICES,
    REPLICA_CPUS,
    SWITCH_S,
    Failure,
    hosts,
    in_lane,
    placement_of,
    remote,
)
from deltafront.workers.replica import Replica
from deltafront.workers.roles import Group, Stage
from deltafront.workers.settings import HandoffConfig, KVDtype, ModelSpec, PrefillConfig, pairing
from deltafront.workers.tracing import SpanSink, Tracer, provider

if TYPE_CHECKING:
    from deltafront.workers.prefill.stage.stage import PrefillStage

_LEAVE_S = 10.0
_ASK_AGAIN_S = 0.2

__all__ = ["REPLICA_CPUS", "PrefillGroup", "placement"]

log = logging.getLogger(__name__)


def placement(config: PrefillConfig) -> tuple[list[dict[str, float]], str]:
    """Return the bundles and strategy of one replica's Ray placement group: bundle 0 for the replica and the
    controller, then one per stage."""
    return placement_of(config.cpus_per_stage, config.gpus_per_stage, config.stages)


@hosts(Stage)
class StageActor:
    def __init__(
        self,
        model: ModelSpec,
        config: PrefillConfig,
        handoff: HandoffConfig,
        spans: SpanSink,
        kv_dtype: KVDtype | None,
        ranks: int,
        stage: int,
    ) -> None:
        self._kv_dtype, self._ranks = kv_dtype, ranks
        self._model, self._config, self._handoff, self._number = model, config, handoff, stage
        self._spans = spans
        self._store: Any = None
        self._stage: PrefillStage | None = None
        self._compilations = Compilations()

    def host(self) -> Rendezvous:
        """Open the store through which the group's stages connect. Only the first stage does this."""
        from deltafront.workers.rendezvous import host_store

        address = str(ray.util.get_node_ip_address())
        self._store, rendezvous = host_store(address, self._config.stages)
        return rendezvous

    def load(self) -> tuple[str, ModelWork | None]:
        """Load this stage's share of the model unless it is loaded. Returns the node's id and, on a GPU, the
        work of all stages."""
        node = str(ray.get_runtime_context().get_node_id())
        if self._stage is not None:
            return node, self._work()
        from deltafront.workers.kv.fetch import RayKVSource
        from deltafront.workers.kv.handoff.transports import kv_sender
        from deltafront.workers.model.decoder.load import set_up_compute_thread
        from deltafront.workers.prefill.stage.stage import load_stage

        set_up_compute_thread(self._config.threads, self._config.device)
        sys.setswitchinterval(SWITCH_S)
        self._compilations = watch(self._config.device, self._config.kernel_cache)
        tell = progress(f"stage {self._number} of {self._config.stages}")
        memory = self._decode_workers_memory(tell)
        ends = partial(kv_sender, self._handoff, ranks=self._ranks, chunk_tokens=self._config.chunk_tokens)
        source = RayKVSource(self._handoff.ack_timeout_s)
        tracer = Tracer(provider(self._spans, f"stage{self._number}:{node[:8]}:{os.getpid()}"))
        self._stage = load_stage(
            self._model,
            self._config,
            self._number,
            None,
            ends,
            memory=memory,
            kv_dtype=self._kv_dtype,
            source=source,
            tell=tell,
            tracer=tracer,
        )
        self._compilations.ready = True
        return node, self._work()

    def _decode_workers_memory(self, tell: Tell) -> Any:
        if self._handoff.transport != "mapped":
            return None
        from deltafront.workers.kv.peer_memory import end_with, map_objects

        tell("waits for the decode worker, whose weights and pages it maps")
        wanted = pairing(self._model, self._handoff, self._kv_dtype, self._ranks)
        exported = _exported_memory(wanted)
        end_with(exported.pid)
        return map_objects(exported, self._config.device)

    def _work(self) -> ModelWork | None:
        stack = self.hosted.stack
        on_gpu = stack.device.type == "cuda"
        return ModelWork.of(stack.config, self._config.stages, stack.quantised) if on_gpu else None

    def join(self, rendezvous: Rendezvous) -> None:
        """Connect this stage to its neighbours. All stages must call this at the same time."""
        from deltafront.workers.prefill.stage.activations import connect_neighbours

        stage, number = self.hosted, self._number
        stage.connect(connect_neighbours(self._store, number, self._config, stage.stack, rendezvous))

    def leave(self) -> None:
        self.hosted.leave()

    @property
    def hosted(self) -> PrefillStage:
        if self._stage is None:
            raise RuntimeError(f"stage {self._number} has not loaded its model")
        return self._stage

    def pulse(self) -> int:
        """Answer a ping, with the process id. The stage answers even while it computes."""
        return os.getpid()

    def compilations(self) -> Phases:
        return self._compilations.phases


@hosts(Group)
class ControllerActor(Leaving):
    """The Ray actor of a group's controller. API servers find it by name. Its calls run concurrently."""

    def __init__(
        self,
        name: str,
        stages: Sequence[Any],
        config: PrefillConfig,
        *,
        nodes: tuple[str, ...],
        work: ModelWork | None,
        pairing: str,
        spans: SpanSink,
    ) -> None:
        self._about: dict[str, Any] = {"nodes": nodes, "pairing": pairing}
        self._stages = stages
        self._compilations: Phases = ()
        self._counting: asyncio.Task[None] | None = None

        def end_stage(hanging: int | None) -> None:
            """Kill the stage that hangs. This breaks the other stages' links to it, so their calls fail.

            The replica decides whether to keep the other stages.
            """
            if hanging is not None:
                ray.kill(stages[hanging])

        async def pulse(number: int) -> None:
            await in_lane(stages[number].pulse, NOTICES)()

        proxies = [remote_stage(actor, n) for n, actor in enumerate(stages)]
        tracer = Tracer(provider(spans, name))
        self.hosted: PrefillController = PrefillController(
            name, proxies, config, end_stage, pulse, work=work, tracer=tracer
        )

    async def stats(self) -> GroupStats:
        counts = self._compilations
        return replace(await self.hosted.stats(), draining=self.draining, compilations=counts, **self._about)

    async def check(self) -> str:
        """Return the reason why the group is lost; empty if it works. Also start to collect the numbers of
        kernels that stages have compiled."""
        if self._counting is None or self._counting.done():
            self._counting = asyncio.create_task(self._count())
        return await self.hosted.check()

    async def _count(self) -> None:
        with contextlib.suppress(RayError):
            asked = (in_lane(stage.compilations, NOTICES)() for stage in self._stages)
            self._compilations = added_up(await asyncio.gather(*asked))

    async def stage_pages(self) -> list[int]:
        return await self.hosted.stage_pages()


def remote_stage(actor: Any, number: int) -> Stage:
    return remote(Stage, f"stage {number}", actor, partial(_stage_error, number))


def _stage_error(number: int, failure: Failure) -> Exception:
    cause = failure.cause
    if cause is None:
        return RuntimeError(f"stage {number} {failure.message}")
    if isinstance(cause, RequestFailed):
        kind = HandoffFailed if isinstance(cause, HandoffFailed) else RequestFailed
        return kind(str(cause))
    return RuntimeError(f"stage {number}: {type(cause).__name__}: {cause}")


class PrefillGroup(Replica):
    """The Serve deployment that owns a group's actors. `head` is the controller."""

    def __init__(
        self,
        model: ModelSpec,
        config: PrefillConfig,
        handoff: HandoffConfig = HandoffConfig(),  # noqa: B008  frozen
        spans: SpanSink = SpanSink(),  # noqa: B008  frozen
        kv_dtype: KVDtype | None = None,
        ranks: int = 1,
    ) -> None:
        super().__init__(PREFILL_PREFIX, config.drain_s)
        self._arguments = model, config, handoff, spans, kv_dtype, ranks
        self._stages: dict[int, Any] = {}
        self._begin()

    def _build(self) -> None:
        model, config, handoff, spans, kv_dtype, ranks = self._arguments
        for number in self._lost():
            self._end(self._stages.pop(number))
        for number in range(config.stages):
            if number not in self._stages:
                cpus, gpus = config.cpus_per_stage, config.gpus_per_stage
                self._stages[number] = self._start(
                    StageActor, number + 1, cpus, gpus, *self._arguments, number
                )
        stages = [self._stages[number] for number in range(config.stages)]
        loaded = ray.get([in_lane(stage.load, COMMANDS)() for stage in stages])
        if config.stages > 1:
            rendezvous = ray.get(in_lane(stages[0].host, COMMANDS)())
            ray.get([in_lane(stage.join, COMMANDS)(rendezvous) for stage in stages])
        nodes, work = tuple(dict.fromkeys(node for node, _ in loaded)), loaded[0][1]
        pair = pairing(model, handoff, kv_dtype, ranks)
        about = {"nodes": nodes, "work": work, "pairing": pair, "spans": spans}
        self._start_head(ControllerActor, 0, 0, 0, stages, config, **about)
        ray.get(self.head.stats.remote())

    def _lost(self) -> list[int]:
        """Return the stages that are dead or do not leave their group in time, as can happen with NCCL."""
        leaving = {number: in_lane(stage.leave, COMMANDS)() for number, stage in self._stages.items()}
        if leaving:
            ray.wait(list(leaving.values()), num_returns=len(leaving), timeout=_LEAVE_S)
        lost = [number for number, left in leaving.items() if not _succeeded(left)]
        if lost:
            log.warning("stages %s are dead, or have not left their group in %g s: they end", lost, _LEAVE_S)
        return lost


def _exported_memory(wanted: str) -> Any:
    """Wait until a decode worker whose pairing is `wanted` exports its weights and KV cache, and return the
    export. Asks all decode workers at once, because one may hang."""
    asked: dict[str, Any] = {}
    while True:
        for name in _decode_workers() - asked.keys():
            with contextlib.suppress(ValueError):  # the actor is gone
                asked[name] = ray.get_actor(name, namespace=NAMESPACE).exported_memory.remote(wanted)
        for name in _answered(asked):
            with contextlib.suppress(RayError):
                if (exported := ray.get(asked.pop(name))) is not None:
                    return exported
        time.sleep(_ASK_AGAIN_S)


def _answered(asked: dict[str, Any]) -> list[str]:
    replies = list(asked.values())
    ready = ray.wait(replies, num_returns=len(replies), timeout=_ASK_AGAIN_S)[0] if replies else []
    return [name for name, reply in asked.items() if reply in ready]


def _decode_workers() -> set[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return {
        actor["name"]
        for actor in named
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(DECODE_PREFIX)
    }


def _succeeded(answer: Any) -> bool:
    try:
        ray.get(answer, timeout=0)
    except RayError:
        return False
    return True
