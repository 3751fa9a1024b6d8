"""Tests the decode actor on a real Ray: found by name, fed through the object store, checked by its
replica."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError
from safetensors.torch import load_file, save_file

from deltafront.workers.messages.events import FinishEvent, FinishReason, FirstTokenTimings, Token
from deltafront.workers.messages.requests import (
    GenerateJob,
    RefusalReason,
    Refused,
    Reservation,
    Reserved,
    Sampling,
)
from deltafront.workers.messages.stages import FirstLogits
from deltafront.workers.messages.states import NAMESPACE, DecodeStats
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.remote import remote
from deltafront.workers.roles import DecodeWorker
from deltafront.workers.settings import DecodeConfig, ModelSpec

from ..tiny_model import make_tiny_model

NEW = 20
FEW = 6
"""Tokens of an answer by two ranks. They wait for each other in every layer, which is slow on busy cores."""
PATIENCE_S = 60.0
HANG_S = 300.0
"""Maximum seconds to wait for an expected event, so that a failing test does not hang."""


@pytest.fixture(scope="module")
def replica(cluster: Any, tiny_llama: Path) -> Iterator[Any]:
    from deltafront.workers.decode.worker import DecodeReplica

    config = DecodeConfig(cache_tokens=2048, page_selection="full", stream_lease_s=600.0)
    replica = DecodeReplica(ModelSpec(path=str(tiny_llama), dtype="float32"), config)
    yield replica
    replica.stop()


async def stream(actor: Any, job: GenerateJob) -> AsyncIterator[Any]:
    async for reference in actor.generate.options(num_returns="streaming").remote(job):
        yield await reference


@pytest.fixture(scope="module")
def replica_of_two(cluster: Any, tiny_llama: Path) -> Iterator[Any]:
    """A worker with two ranks."""
    from deltafront.workers.decode.worker import DecodeReplica

    config = DecodeConfig(
        cache_tokens=2048, page_selection="full", stream_lease_s=600.0, tensor_parallel=2, warm_up=True
    )
    replica = DecodeReplica(ModelSpec(path=str(tiny_llama), dtype="float32"), config)
    yield replica
    replica.stop()


async def answer_of(cluster: Any, replica: Any, run: Any, request_id: str, ids: list[int]) -> list[int]:
    """Return a prompt's answer through Ray. All its pages are free afterwards."""
    from deltafront.workers.kv.handoff.object_store import ObjectStoreOutbox
    from deltafront.workers.kv.handoff.outbox import Delivery

    actor = cluster.get_actor(replica.name, namespace=NAMESPACE)
    await actor.reserve.remote(
        Reservation(request_id=request_id, owner="me", new_tokens=len(ids), max_tokens=FEW)
    )
    outbox, prompt, delivery = ObjectStoreOutbox(256 << 20, 60.0), run.prefill(ids), Delivery(replica.name)
    for piece in run.pieces(request_id, prompt):
        outbox.send_kv(delivery, piece)
    outbox.send_logits(delivery, FirstLogits(request_id=request_id, logits=prompt.logits))
    job = GenerateJob(request_id=request_id, sampling=Sampling(max_tokens=FEW, ignore_eos=True))
    events = [event async for event in stream(actor, job)]
    outbox.check(delivery)
    stats = await actor.stats.remote()
    assert stats.pages_free == stats.pages_total
    return [event.token_id for event in events if isinstance(event, Token)]


async def test_worker_of_two_ranks_is_replaced_when_either_rank_dies(
    cluster: Any, replica_of_two: Any, bench: Any
) -> None:
    """Each rank is killed once. Requests run concurrently and one after the other."""
    run, replica = await bench(), replica_of_two
    prompts = [np.random.default_rng(n).integers(0, 198, 40 + 30 * n).tolist() for n in range(3)]
    wanted = [(await run.ask("here", ids, Sampling(max_tokens=FEW, ignore_eos=True))).ids for ids in prompts]
    for killed in ("rank 1", "rank 0", ""):
        for number, ids in enumerate(prompts):
            assert await answer_of(cluster, replica, run, f"r{number}", ids) == wanted[number]
        if not killed:
            continue
        lost = replica.name
        cluster.kill(replica.head if killed == "rank 0" else replica._ranks[0])
        async with asyncio.timeout(HANG_S):
            while replica.name == lost or not replica._rebuilding.done():
                await replica.check_health()
                await asyncio.sleep(0.05)
        await replica.check_health()


@pytest.mark.parametrize("ranks", [1, 2])
def test_start_names_a_missing_tensor_with_one_rank_or_two(cluster: Any, tmp_path: Path, ranks: int) -> None:
    from deltafront.workers.decode.worker import DecodeReplica

    directory = make_tiny_model(tmp_path / "tiny")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors")
    config = DecodeConfig(cache_tokens=512, page_selection="full", tensor_parallel=ranks)
    with pytest.raises(ModelError, match=r"model\.layers\.3\.mlp\.up_proj\.weight"):
        DecodeReplica(ModelSpec(path=str(directory), dtype="float32"), config)


def test_start_fails_if_a_rank_fails(cluster: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise rank 0 would wait for it in its first all-reduce."""
    from deltafront.workers.decode import worker

    class Failing(worker.RankActor):  # type: ignore[misc]
        async def compute(self, number: int, work: str, *arguments: Any) -> None:
            self._in_order(number, lambda: self.hosted.compute(work, "too many", *arguments))

    monkeypatch.setattr(worker, "RankActor", Failing)
    config = DecodeConfig(cache_tokens=512, page_selection="full", tensor_parallel=2, warm_up=True)
    with pytest.raises(RuntimeError, match="rank 1: compile failed: TypeError"):
        worker.DecodeReplica(ModelSpec(path=str(tiny_llama), dtype="float32"), config)


def test_start_fails_if_a_rank_does_not_answer(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from deltafront.workers.decode import worker

    @ray.remote(num_cpus=0)
    class Hung:
        async def check(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(worker, "HEAD_PATIENCE_S", 0.1)
    rank = Hung.remote()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"rank 1 has not answered for 0\.1 s"):
        worker.check_ranks([rank])
    ray.kill(rank)


@pytest.mark.long
async def test_worker_is_replaced_when_a_rank_hangs(
    cluster: Any, replica_of_two: Any, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltafront.workers.decode import worker

    monkeypatch.setattr(worker, "HEAD_PATIENCE_S", 1.0)
    run, replica = await bench(), replica_of_two
    ids = np.random.default_rng(1).integers(0, 198, 70).tolist()
    wanted = (await run.ask("here", ids, Sampling(max_tokens=FEW, ignore_eos=True))).ids
    await replica.check_health()
    lost, (rank,) = replica.name, replica._ranks
    os.kill(await rank.__ray_call__.remote(lambda _rank: os.getpid()), signal.SIGSTOP)
    async with asyncio.timeout(HANG_S):
        while replica.name == lost or not replica._rebuilding.done():
            await replica.check_health()
            await asyncio.sleep(0.05)
    await replica.check_health()
    assert await answer_of(cluster, replica, run, "again", ids) == wanted


async def test_answer_through_ray_equals_an_in_process_engines(
    cluster: Any, replica: Any, bench: Any
) -> None:
    from deltafront.workers.kv.handoff.object_store import ObjectStoreOutbox
    from deltafront.workers.kv.handoff.outbox import Delivery

    ids = np.random.default_rng(0).integers(0, 198, 70).tolist()
    sampling = Sampling(temperature=0.8, max_tokens=NEW, seed=5, ignore_eos=True)
    run = await bench()
    here = await run.ask("here", ids, sampling)

    actor = cluster.get_actor(replica.name, namespace=NAMESPACE)
    assert await actor.reserve.remote(
        Reservation(request_id="r", owner="me", new_tokens=70, max_tokens=NEW)
    ) == Reserved(pages=6)
    outbox, prompt, delivery = ObjectStoreOutbox(256 << 20, 60.0), run.prefill(ids), Delivery(replica.name)
    for piece in run.pieces("r", prompt):
        outbox.send_kv(delivery, piece)
    outbox.send_logits(delivery, FirstLogits(request_id="r", logits=prompt.logits))
    events = [
        event async for event in stream(actor, GenerateJob(request_id="r", sampling=sampling, keep_tokens=70))
    ]
    outbox.check(delivery)
    assert isinstance(events[0], FirstTokenTimings)
    assert isinstance(events[-1], FinishEvent) and events[-1].reason is FinishReason.LENGTH
    tokens = [event.token_id for event in events if isinstance(event, Token)]
    assert tokens == here.ids
    session = events[0].session.session_id
    assert session is not None and session.startswith(replica.name.removeprefix("decode:") + ".")
    stats: DecodeStats = await actor.stats.remote()
    assert (stats.pages_free, stats.sessions, stats.running) == (stats.pages_total - 5, 1, 0)
    assert stats.node == cluster.get_runtime_context().get_node_id()
    refused = await actor.reserve.remote(
        Reservation(request_id="s", owner="you", new_tokens=1, max_tokens=1, session_id=session)
    )
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NO_SESSION
    leaving = actor.drain.remote(600.0)
    while not (await actor.stats.remote()).draining:
        await asyncio.sleep(0.05)
    assert not cluster.wait([leaving], timeout=0)[0], "it still keeps a session"
    assert await actor.release_session.remote(session, "me")
    await leaving
    assert (await actor.stats.remote()).pages_free == stats.pages_total


async def test_cancelling_a_stream_frees_its_pages(cluster: Any, replica: Any, bench: Any) -> None:
    actor, run = replica.head, await bench()
    prompt = run.prefill([3] * 40)
    await actor.reserve.remote(Reservation(request_id="long", owner="me", new_tokens=40, max_tokens=900))
    for piece in run.pieces("long", prompt):
        await actor.announce.remote(piece)
    await actor.first_logits.remote(FirstLogits(request_id="long", logits=prompt.logits))
    seen = []
    async for event in stream(
        actor, GenerateJob(request_id="long", sampling=Sampling(max_tokens=900, ignore_eos=True))
    ):
        seen.append(event)
        if len(seen) == 10:
            await actor.cancel.remote("long")
            stats = await actor.stats.remote()
            assert stats.pages_free == stats.pages_total
    assert seen[-1].reason is FinishReason.CANCELLED
    assert seen[-1].completion_tokens < 900


async def test_frozen_door_does_not_cost_the_worker(cluster: Any, replica: Any, bench: Any) -> None:
    """A frozen process acknowledges nothing, like one whose node has lost its power. Ray does not notice it
    in this test, and would block the worker's event loop at the end of the stream."""

    @cluster.remote(num_cpus=0)
    class Door:
        async def ask(self, actor: Any, job: GenerateJob) -> int:
            worker = remote(DecodeWorker, "decode", actor, lambda failure: RuntimeError(failure.message))
            self.stream = worker.generate(job)
            await anext(self.stream)
            return os.getpid()

    actor, name, run = replica.head, replica.name, await bench()
    prompt = run.prefill([3] * 40)
    await actor.reserve.remote(Reservation(request_id="frozen", owner="me", new_tokens=40, max_tokens=900))
    for piece in run.pieces("frozen", prompt):
        await actor.announce.remote(piece)
    await actor.first_logits.remote(FirstLogits(request_id="frozen", logits=prompt.logits))
    sampling = Sampling(max_tokens=900, ignore_eos=True)
    door = Door.remote()  # type: ignore[attr-defined]  # Ray would end a door without a handle
    pid = await door.ask.remote(actor, GenerateJob(request_id="frozen", sampling=sampling))
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await actor.cancel.remote("frozen")
            for _ in range(20):  # the stream ends meanwhile
                await actor.stats.remote()
                await asyncio.sleep(0.05)
            while (stats := await actor.stats.remote()).pages_free < stats.pages_total:
                await asyncio.sleep(0.05)
            await replica.check_health()
        assert replica.name == name and await actor.check.remote() == ""
    finally:
        os.kill(pid, signal.SIGKILL)


async def test_dead_actor_is_replaced_in_its_replica(cluster: Any, replica: Any) -> None:
    await replica.check_health()
    lost, head = replica.name, replica.head
    cluster.kill(head)
    async with asyncio.timeout(HANG_S):
        while replica.name == lost or not replica._rebuilding.done():
            await replica.check_health()
            await asyncio.sleep(0.05)
    await replica.check_health()
    actor = cluster.get_actor(replica.name, namespace=NAMESPACE)
    assert await actor.reserve.remote(
        Reservation(request_id="r", owner="me", new_tokens=70, max_tokens=NEW)
    ) == Reserved(pages=6)


async def test_replica_that_cannot_replace_its_actor_stays_unhealthy(cluster: Any, replica: Any) -> None:
    """This must be the last test of the shared replica, because it makes the replica unusable."""
    await replica.check_health()

    def broken() -> None:
        raise RuntimeError("no GPU is left")

    replica._build = broken
    cluster.kill(replica.head)
    with pytest.raises(RuntimeError, match="no GPU is left"):
        async with asyncio.timeout(HANG_S):
            while True:
                await replica.check_health()
                await asyncio.sleep(0.05)
    with pytest.raises(RuntimeError, match="no GPU is left"):
        await replica.check_health()


async def test_worker_whose_rank_cannot_restart_stays_unhealthy(
    cluster: Any, replica_of_two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This must be the last test of the worker with two ranks."""
    from deltafront.workers.decode import worker

    class Broken(worker.RankActor):  # type: ignore[misc]
        def __init__(self, *_arguments: Any) -> None:
            raise RuntimeError("no GPU is left")

    replica = replica_of_two
    await replica.check_health()
    monkeypatch.setattr(worker, "RankActor", Broken)
    cluster.kill(replica._ranks[0])
    for _ in range(2):
        with pytest.raises(ActorDiedError, match="no GPU is left"):
            async with asyncio.timeout(HANG_S):
                while True:
                    await replica.check_health()
                    await asyncio.sleep(0.05)
