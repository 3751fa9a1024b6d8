"""A decode worker in Ray: one actor per rank, and the Serve deployment that owns them. It imports no
torch."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from deltafront.kernels.compilations import watch
from deltafront.workers.leaving import Leaving
from deltafront.workers.messages.requests import DecodeFailed
from deltafront.workers.messages.stages import Rendezvous
from deltafront.workers.messages.states import DECODE_PREFIX, DecodeStats
from deltafront.workers.progress import Tell, progress, silent
from deltafront.workers.remote import REPLICA_CPUS, SWITCH_S, Failure, failure_of, hosts, placement_of, remote
from deltafront.workers.replica import HEAD_PATIENCE_S, Replica
from deltafront.workers.roles import DecodeWorker, Rank
from deltafront.workers.settings import DecodeConfig, HandoffConfig, ModelSpec, pairing
from deltafront.workers.tracing import NO_TRACER, SpanSink, Tracer, provider

if TYPE_CHECKING:
    from deltafront.workers.decode.engine import DecodeEngine
    from deltafront.workers.decode.ranks import FollowerRank, ReaderMaker

_ASK_S = 1.0
"""While rank 0 starts, seconds between checks of the other ranks."""

__all__ = ["REPLICA_CPUS", "DecodeReplica", "placement"]


def placement(config: DecodeConfig) -> tuple[list[dict[str, float]], str]:
    """Return the bundles and strategy of a replica's Ray placement group: bundle 0 for the replica, then one
    per rank. All ranks are placed on one host."""
    bundles, strategy = placement_of(config.cpus, config.gpus, config.tensor_parallel)
    return bundles, "STRICT_PACK" if config.tensor_parallel > 1 else strategy


@hosts(DecodeWorker)
class DecodeActor(Leaving):
    """The Ray actor of rank 0. Calls wait until it has loaded. `ranks` are the actors of the other ranks."""

    def __init__(
        self,
        name: str,
        model: ModelSpec,
        config: DecodeConfig,
        handoff: HandoffConfig,
        spans: SpanSink,
        ranks: Sequence[Any] = (),
    ) -> None:
        from deltafront.workers.kv.handoff.transports import kv_reader

        self._pairing = pairing(model, handoff, config.kv_dtype, config.tensor_parallel)
        self._compilations = watch(config.device, config.kernel_cache)
        sys.setswitchinterval(SWITCH_S)
        self._ranks = ranks
        links = [RankOverRay(number, actor) for number, actor in enumerate(ranks, start=1)]
        tracer = Tracer(provider(spans, name))
        self.hosted: DecodeEngine = load_engine(
            name,
            model,
            config,
            reader=partial(kv_reader, handoff),
            ranks=links,
            tell=progress(name),
            tracer=tracer,
        )

    async def start(self) -> None:
        if self._ranks:
            await self._join()
        await self.hosted.start()
        gc.collect()
        gc.freeze()  # garbage collection during decode then skips the objects that exist now
        self._compilations.ready = True

    async def _join(self) -> None:
        from deltafront.workers.rendezvous import host_store

        address = str(ray.util.get_node_ip_address())
        self._store, rendezvous = host_store(address, len(self._ranks) + 1)
        others = [actor.join.remote(rendezvous) for actor in self._ranks]
        await asyncio.gather(asyncio.to_thread(self.hosted.join, rendezvous), *others)

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

    async def exported_memory(self, pairing: str) -> Any:
        """Return `DecodeEngine.exported_memory`, for the prefill stage that shares this GPU; None if its
        `pairing` differs from this worker's."""
        return self.hosted.exported_memory() if pairing == self._pairing else None


def load_engine(
    name: str,
    model: ModelSpec,
    config: DecodeConfig,
    *,
    reader: ReaderMaker,
    ranks: Sequence[Rank] = (),
    tell: Tell = silent,
    tracer: Tracer = NO_TRACER,
) -> DecodeEngine:
    """Load rank 0's part of the model and make the engine. Raises ModelError, and the errors of
    `DecodeEngine`.
    """
    from deltafront.workers.decode.engine import DecodeEngine
    from deltafront.workers.decode.ranks import load_part, store_digest
    from deltafront.workers.model.directory.store import located
    from deltafront.workers.model.grammars import Grammars

    model = located(model)
    stack = load_part(model, config, 0, tell)
    grammars = Grammars(Path(model.path), stack.config.vocab, stack.config.eos_ids)
    grammars.load_soon()
    return DecodeEngine(
        name,
        stack,
        config,
        reader=reader,
        ranks=ranks,
        digest=store_digest(model, config),
        grammars=grammars,
        tracer=tracer,
    )


@hosts(Rank)
class RankActor:
    """The Ray actor of a tensor-parallel worker with rank > 0."""

    def __init__(
        self, rank: int, model: ModelSpec, config: DecodeConfig, handoff: HandoffConfig, _spans: SpanSink
    ) -> None:
        from deltafront.workers.decode.ranks import InOrder, load_rank
        from deltafront.workers.kv.handoff.transports import kv_reader

        watch(config.device, config.kernel_cache)
        tell = progress(f"rank {rank} of {config.tensor_parallel}")
        self.hosted: FollowerRank = load_rank(
            rank, model, config, reader=partial(kv_reader, handoff), tell=tell
        )
        self._in_order = InOrder()

    async def join(self, rendezvous: Rendezvous) -> None:
        await asyncio.to_thread(self.hosted.join, rendezvous)

    async def compute(self, number: int, work: str, *arguments: Any) -> None:
        """Run calls in the order of their numbers, because Ray may deliver them in another order."""
        self._in_order(number, lambda: self.hosted.compute(work, *arguments))

    async def state(self, number: int, work: str, *arguments: Any) -> Any:
        """Run `FollowerRank.ordered` in the order of numbers, which calls of `compute` have, too."""
        begun = asyncio.get_running_loop().create_future()
        self._in_order(number, lambda: begun.set_result(self.hosted.ordered(work, *arguments)))
        return await asyncio.wrap_future(await begun)

    async def check(self) -> str:
        return self.hosted.fault


class RankOverRay:
    """Rank 0's proxy for another rank. Only one thread may call `compute`; `state` may be called beside
    it."""

    def __init__(self, number: int, actor: Any) -> None:
        self._actor = actor
        self._numbers = itertools.count()
        rank = remote(Rank, f"rank {number}", actor, partial(_rank_error, number))
        self.read, self.kv, self.move, self.stored = rank.read, rank.kv, rank.move, rank.stored
        self._state: Callable[..., Awaitable[Any]] = rank.state

    def compute(self, work: str, *arguments: Any) -> None:
        self._actor.compute.remote(next(self._numbers), work, *arguments)

    async def state(self, work: str, *arguments: Any) -> Any:
        return await self._state(next(self._numbers), work, *arguments)


def _rank_error(number: int, failure: Failure) -> Exception:
    if isinstance(failure.cause, Exception):
        return failure.cause
    return DecodeFailed(f"rank {number} {failure.message}")


class DecodeReplica(Replica):
    """The Serve deployment that owns the actors of a decode worker's ranks. `head` is rank 0.

    If one rank is lost, all are restarted, because the others hang in a collective operation.
    """

    def __init__(
        self,
        model: ModelSpec,
        config: DecodeConfig,
        handoff: HandoffConfig = HandoffConfig(),  # noqa: B008  frozen
        spans: SpanSink = SpanSink(),  # noqa: B008  frozen
    ) -> None:
        super().__init__(DECODE_PREFIX, config.drain_s)
        self._arguments = model, config, handoff, spans
        self._ranks: list[Any] = []
        self._begin()

    def _build(self) -> None:
        _model, config, _handoff, _spans = self._arguments
        self._ranks = [
            self._start(RankActor, rank + 1, config.cpus, config.gpus, rank, *self._arguments)
            for rank in range(1, config.tensor_parallel)
        ]
        self._start_head(DecodeActor, 1, config.cpus, config.gpus, *self._arguments, self._ranks)
        ray.get([rank.check.remote() for rank in self._ranks])
        started = self.head.start.remote()
        while not ray.wait([started], timeout=_ASK_S)[0]:
            check_ranks(self._ranks)
        ray.get(started)

    async def _fault(self) -> str:
        ranks = (_rank_fault(number, rank) for number, rank in enumerate(self._ranks, start=1))
        faults = await asyncio.gather(super()._fault(), *ranks)
        return "; ".join(filter(None, faults))

    def _rebuild(self) -> None:
        self.stop()
        self._build()


def check_ranks(ranks: Sequence[Any]) -> None:
    """Raise RuntimeError or RayError if a rank has failed, has died or does not answer. Rank 0 would
    otherwise wait for that rank forever."""
    for number, check in enumerate([rank.check.remote() for rank in ranks], start=1):
        if not ray.wait([check], timeout=HEAD_PATIENCE_S)[0]:
            raise RuntimeError(f"rank {number} has not answered for {HEAD_PATIENCE_S:g} s")
        if fault := ray.get(check):
            raise RuntimeError(f"rank {number}: {fault}")


async def _rank_fault(number: int, rank: Any) -> str:
    try:
        async with asyncio.timeout(HEAD_PATIENCE_S):
            fault = str(await rank.check.remote())
    except TimeoutError:
        fault = f"has not answered for {HEAD_PATIENCE_S:g} s"
    except RayError as error:
        fault = failure_of(error).message
    return f"rank {number}: {fault}" if fault else ""
