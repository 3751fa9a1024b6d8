"""Ray's side of a decode worker: its actor, and the Serve deployment that owns it, without torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import ray

from ...kernels.compilations import watch
from ..leaving import Leaving
from ..messages.states import DECODE_PREFIX, DecodeStats
from ..progress import progress
from ..remote import REPLICA_CPUS, hosts, placement_of
from ..replica import Replica
from ..roles import DecodeWorker
from ..settings import DecodeConfig, HandoffConfig, ModelSpec, pairing
from ..tracing import SpanSink, Tracer, provider

if TYPE_CHECKING:
    from .engine import DecodeEngine


__all__ = ["REPLICA_CPUS", "DecodeReplica", "placement"]


def placement(config: DecodeConfig) -> tuple[list[dict[str, float]], str]:
    return placement_of(config.cpus, config.gpus, 1)


@hosts(DecodeWorker)
class DecodeActor(Leaving):
    """Calls wait for loading."""

    def __init__(
        self, name: str, model: ModelSpec, config: DecodeConfig, handoff: HandoffConfig, spans: SpanSink
    ) -> None:
        from ..kv.handoff.transports import kv_reader
        from .engine import load_engine

        self._pairing = pairing(model, handoff)
        self._compilations = watch(config.device, config.kernel_cache)
        tracer = Tracer(provider(spans, name))
        self.hosted: DecodeEngine = load_engine(
            name, model, config, reader=partial(kv_reader, handoff), tell=progress(name), tracer=tracer
        )

    async def start(self) -> None:
        await self.hosted.start()
        self._compilations.ready = True

    async def stats(self) -> DecodeStats:
        return replace(
            await self.hosted.stats(),
            node=ray.get_runtime_context().get_node_id(),
            draining=self.draining,
            compilations=self._compilations.phases,
            pairing=self._pairing,
        )

    async def check(self) -> str:
        return self.hosted.fault


class DecodeReplica(Replica):
    """`head` is the actor."""

    def __init__(
        self,
        model: ModelSpec,
        config: DecodeConfig,
        handoff: HandoffConfig = HandoffConfig(),  # noqa: B008  frozen
        spans: SpanSink = SpanSink(),  # noqa: B008  frozen
    ) -> None:
        super().__init__(DECODE_PREFIX, config.drain_s)
        self._arguments = model, config, handoff, spans
        self._build()

    def _build(self) -> None:
        _model, config, _handoff, _spans = self._arguments
        self._start_head(DecodeActor, 1, config.cpus, config.gpus, *self._arguments)
        ray.get(self.head.start.remote())
