"""Tests the prefill group on real Ray: two stages linked by gloo send KV through the object store to a fake
decode worker."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from deltafront.kernels.methods import method_spec
from deltafront.tests.numerics import assert_rows_close
from deltafront.workers.messages.events import ChunkRead, PrefillDone
from deltafront.workers.messages.requests import (
    PrefillCancelled,
    PrefillFailed,
    PrefillJob,
)
from deltafront.workers.messages.states import NAMESPACE
from deltafront.workers.prefill.group.group import PrefillGroup, placement, remote_stage
from deltafront.workers.remote import NOTICES, hosts, in_lane, start_actor
from deltafront.workers.roles import Stage
from deltafront.workers.settings import ModelSpec, PrefillConfig

from ..tiny_model import HEAD_DIM, KV_HEADS, LAYERS, random_ids, whole_prompt

DENSE = method_spec("dense")
HANG_S = 300.0
"""Maximum seconds to wait for an expected event, so that a failing test does not hang."""
CONFIG = PrefillConfig(
    stages=2, chunk_tokens=128, cache_tokens=4096, cpus_per_stage=0.5, stream_lease_s=600.0
)


@pytest.fixture(scope="module")
def group(cluster: Any, model: ModelSpec) -> Iterator[PrefillGroup]:
    """A group that the tests share. A test that damages it waits until it is replaced."""
    made = PrefillGroup(model, CONFIG)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def worker(cluster: Any) -> Iterator[Any]:
    """Start an actor that copies announced KV, as a decode worker does. Its class is local, so that Ray
    pickles it by value."""
    from deltafront.workers.kv.handoff.object_store import pull

    class FakeDecode:
        def __init__(self) -> None:
            self.forget()

        def forget(self) -> None:
            self.kv: dict[Any, Any] = {}
            self.logits: dict[str, Any] = {}

        async def announce(self, announcement: Any) -> None:
            if announcement.request_id == "unwanted":
                raise ValueError("no such request here")
            pulled = await pull(announcement, KV_HEADS, HEAD_DIM, torch.float32)
            for n, (k, v) in enumerate(pulled):
                key = announcement.request_id, announcement.layer + n, announcement.start
                self.kv[key] = k.clone(), v.clone()

        async def first_logits(self, message: Any) -> None:
            self.logits[message.request_id] = message.logits

        async def result(self, request_id: str, layers: int, tokens: int) -> Any:
            while request_id not in self.logits:
                await asyncio.sleep(0.01)
            joined = [self.joined(request_id, layer) for layer in range(layers)]
            while any(k.shape[0] < tokens for k, _v in joined):
                await asyncio.sleep(0.01)
                joined = [self.joined(request_id, layer) for layer in range(layers)]
            return self.logits[request_id], joined

        def joined(self, request_id: str, layer: int) -> Any:
            parts = [self.kv[key] for key in sorted(self.kv) if key[:2] == (request_id, layer)]
            return (
                tuple(torch.cat(side) for side in zip(*parts, strict=True))
                if parts
                else (torch.empty(0),) * 2
            )

    name = f"decode:test{time.monotonic_ns()}"
    actor = ray.remote(FakeDecode).options(name=name, namespace=NAMESPACE, num_cpus=0).remote()
    ray.get(actor.__ray_ready__.remote())
    yield name, actor
    ray.kill(actor)


@pytest.fixture
def decode(worker: Any) -> Any:
    """Return the actor's name and the actor, without KV of an earlier test."""
    ray.get(worker[1].forget.remote())
    return worker


def job(request_id: str, token_ids: bytes, decode_worker: str) -> PrefillJob:
    return PrefillJob(request_id=request_id, token_ids=token_ids, method=DENSE, decode_worker=decode_worker)


async def events_of(group: PrefillGroup, asked: PrefillJob) -> AsyncIterator[Any]:
    async for reference in group.head.prefill.remote(asked):
        yield await reference


async def drained(group: PrefillGroup) -> bool:
    stats = await group.head.stats.remote()
    return stats.pages_free == stats.pages_total and not any(await group.head.stage_pages.remote())


async def test_prefill_hands_over_all_layers_and_the_logits(
    group: PrefillGroup, decode: Any, model: ModelSpec
) -> None:
    name, actor = decode
    ids = random_ids(600)
    seen = [event async for event in events_of(group, job("r1", ids, name))]
    assert [e.tokens_done for e in seen[:-1]] == [128, 256, 384, 512, 600]
    report = seen[-1].report
    assert isinstance(seen[-1], PrefillDone)
    assert sum(report.critical.values()) == pytest.approx(report.wall, abs=1e-9)
    logits_V, kv = await actor.result.remote("r1", LAYERS, 600)
    wanted_V, wanted = whole_prompt(Path(model.path), ids, DENSE)
    assert_rows_close(torch.from_numpy(logits_V.copy())[None], wanted_V[None])
    for layer in range(LAYERS):
        for got, expected in zip(kv[layer], wanted[layer], strict=True):
            assert_rows_close(got, expected)
    assert await drained(group)
    assert (await group.head.stats.remote()).nodes == (ray.get_runtime_context().get_node_id(),)


async def test_cancelling_ends_the_stream_and_frees_every_page(group: PrefillGroup, decode: Any) -> None:
    asked = job("r2", random_ids(3000), decode[0])
    with pytest.raises(PrefillCancelled):
        async for event in events_of(group, asked):
            if isinstance(event, ChunkRead):
                await group.head.cancel.remote("r2")
                assert await drained(group), "cancel returns when pages are free"
    await group.head.cancel.remote("r2")
    assert await drained(group)


async def test_abandon_runs_during_a_chunk_and_commands_keep_order(cluster: Any) -> None:
    class Slow:
        """A stage whose chunks end only when they are abandoned. The class is local, so that Ray pickles it
        by value."""

        def __init__(self) -> None:
            self.wanted, self.order = True, list[str]()

        def open(self, request: Any) -> None: ...

        def run_batch(self, command: Any) -> Any:
            until = time.monotonic() + HANG_S
            while self.wanted and time.monotonic() < until:
                time.sleep(0.005)
            return lambda: "never stopped" if self.wanted else "stopped"

        def close(self, request_id: str) -> Any:
            self.order.append(request_id)
            return list(self.order)

        def pages_used(self) -> int:
            return 0

        def abandon(self, serial: int) -> None:
            self.wanted = False

    @hosts(Stage)
    class SlowActor:
        def __init__(self) -> None:
            self.hosted = Slow()

    actor = start_actor(SlowActor, 0, 0, {})
    stage: Any = remote_stage(actor, 0)
    replies = [stage.run_batch(None), *(stage.close(name) for name in "abcde")]
    stage.abandon(1)
    assert await asyncio.gather(*replies) == ["stopped", *(list("abcde"[: n + 1]) for n in range(5))]
    ray.kill(actor)
    with pytest.raises(RuntimeError, match="stage 0 died"):
        while True:  # Ray kills actors with a delay
            await stage.pages_used()


async def test_cancelling_the_stream_cancels_its_request(group: PrefillGroup, decode: Any) -> None:
    asked = job("r3", random_ids(3000), decode[0])
    stream = group.head.prefill.remote(asked)
    await (await anext(stream))
    ray.cancel(stream)
    async with asyncio.timeout(HANG_S):
        while not await drained(group):
            await asyncio.sleep(0.02)


async def test_lost_decode_worker_fails_its_request_but_not_the_group(
    group: PrefillGroup, decode: Any
) -> None:
    with pytest.raises(PrefillFailed, match="decode:nobody did not take KV"):
        async for _ in events_of(group, job("r4", random_ids(300), "decode:nobody")):
            pass
    with pytest.raises(PrefillFailed, match="no such request here"):
        async for _ in events_of(group, job("unwanted", random_ids(3000), decode[0])):
            pass
    seen = [event async for event in events_of(group, job("r5", random_ids(200), decode[0]))]
    assert isinstance(seen[-1], PrefillDone)
    assert await drained(group)


async def pid_of(group: PrefillGroup, stage: int) -> int:
    return int(await in_lane(group._stages[stage].pulse, NOTICES)())


async def healed(group: PrefillGroup) -> None:
    """Check the group's health as Serve does, until it has a new head. No check may fail."""
    lost = group.name
    async with asyncio.timeout(HANG_S):
        while group.name == lost or group._rebuilding is None or not group._rebuilding.done():
            await group.check_health()
            await asyncio.sleep(0.05)
    await group.check_health()


async def assert_reads_rightly(group: PrefillGroup, decode: Any, model: ModelSpec, name: str) -> None:
    ids = random_ids(600)
    seen = [event async for event in events_of(group, job(name, ids, decode[0]))]
    assert isinstance(seen[-1], PrefillDone)
    logits_V, _kv = await decode[1].result.remote(name, LAYERS, 600)
    wanted_V, _wanted = whole_prompt(Path(model.path), ids, DENSE)
    assert_rows_close(torch.from_numpy(logits_V.copy())[None], wanted_V[None])
    assert await drained(group)


@pytest.mark.parametrize("victim", [0, 1])
async def test_only_a_killed_stage_is_loaded_again(
    group: PrefillGroup, decode: Any, model: ModelSpec, victim: int
) -> None:
    await group.check_health()
    pids, head = [await pid_of(group, stage) for stage in range(2)], group.head

    async def run(name: str) -> str:
        with pytest.raises(PrefillFailed) as failure:
            async for event in events_of(group, job(name, random_ids(1800, 3), decode[0])):
                if isinstance(event, ChunkRead) and event.tokens_done == 256:
                    ray.kill(group._stages[victim])
        return str(failure.value.cause)  # type: ignore[attr-defined]

    messages = await asyncio.gather(run("a"), run("b"))
    assert len(set(messages)) == 1
    assert "prefill:" in messages[0] and "\n" not in messages[0] and "stage" in messages[0]
    with pytest.raises(PrefillFailed, match="is lost"):
        await head.stats.remote()
    await healed(group)
    same = [await pid_of(group, stage) == pid for stage, pid in enumerate(pids)]
    assert same == [stage != victim for stage in range(2)], "the other one kept its process and its weights"
    await assert_reads_rightly(group, decode, model, "after")


@pytest.mark.parametrize(
    ("read", "owes"), [(0, "opening a"), (512, "the chunk of a at token")], ids=["first chunk", "later"]
)
async def test_replaces_a_stopped_stage(
    group: PrefillGroup, decode: Any, model: ModelSpec, read: int, owes: str
) -> None:
    """A stage stopped by SIGSTOP neither dies nor answers. Also before the controller knows how long a chunk
    takes."""
    if not read:
        ray.kill(group.head)
        await healed(group)
    first, pid = await pid_of(group, 0), await pid_of(group, 1)
    if not read:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(PrefillFailed) as failure:
        async for event in events_of(group, job("a", random_ids(3900), decode[0])):
            if isinstance(event, ChunkRead) and event.tokens_done == read:
                os.kill(pid, signal.SIGSTOP)
    assert f"stage 1 does not answer: {owes}" in str(failure.value.cause)  # type: ignore[attr-defined]
    await healed(group)
    assert await pid_of(group, 0) == first
    await assert_reads_rightly(group, decode, model, "after")
    async with asyncio.timeout(HANG_S):
        while Path(f"/proc/{pid}").exists() and "(zombie)" not in Path(f"/proc/{pid}/status").read_text():
            await asyncio.sleep(0.05)


async def test_replaces_a_lost_controller_and_keeps_all_stages(
    group: PrefillGroup, decode: Any, model: ModelSpec
) -> None:
    pids, head = [await pid_of(group, stage) for stage in range(2)], group.head
    reading = events_of(group, job("a", random_ids(3900), decode[0]))
    await anext(reading)
    ray.kill(head)
    with pytest.raises(ray.exceptions.RayActorError):
        async for _ in reading:
            pass
    await healed(group)
    assert [await pid_of(group, stage) for stage in range(2)] == pids
    assert not any(await group.head.stage_pages.remote()), "the lost prompt's pages are free"
    await assert_reads_rightly(group, decode, model, "after")


def test_placement_has_a_bundle_for_the_replica_and_each_stage() -> None:
    bundles, strategy = placement(PrefillConfig(stages=3, cpus_per_stage=2.0, gpus_per_stage=1.0))
    assert bundles == [{"CPU": 0.1}] + 3 * [{"CPU": 2.0, "GPU": 1.0}]
    assert strategy == "PACK"
