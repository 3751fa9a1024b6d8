"""Tests a stage that maps a decode worker's memory, both on a real Ray: answers, and deaths of either."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayError

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.methods import method_spec
from deltafront.tests.workers.in_process import InProcessReader
from deltafront.tests.workers.in_ranks import part
from deltafront.workers.decode.engine import DecodeEngine
from deltafront.workers.decode.worker import DecodeReplica
from deltafront.workers.messages.events import ChunkRead, PrefillDone, Token
from deltafront.workers.messages.requests import GenerateJob, PrefillJob, Reservation, Sampling
from deltafront.workers.messages.states import DECODE_PREFIX, NAMESPACE
from deltafront.workers.prefill.group.group import PrefillGroup
from deltafront.workers.settings import DecodeConfig, HandoffConfig, ModelSpec, PrefillConfig

from .keys import key_of
from .prompts import packed
from .test_resume import Line, group
from .tiny_model import random_ids

TOKENS, NEW, CHUNK = 600, 6, 128
HANG_S = 300.0
"""Maximum seconds to wait for an expected event, so that a failing test does not hang."""
PREFILL = PrefillConfig(stages=1, chunk_tokens=CHUNK, cache_tokens=4096, stream_lease_s=600.0)
DECODE = DecodeConfig(cache_tokens=4096, page_selection="full", stream_lease_s=600.0)


@dataclass
class Pair:
    """A decode worker and a prefill group."""

    ray: Any
    worker: DecodeReplica
    group: PrefillGroup

    @property
    def decode(self) -> Any:
        return self.ray.get_actor(self.worker.name, namespace=NAMESPACE)

    async def reserve(self, name: str, tokens: int = TOKENS, **more: Any) -> None:
        await self.decode.reserve.remote(
            Reservation(request_id=name, owner="me", new_tokens=tokens, max_tokens=NEW, **more)
        )

    async def read(self, name: str, ids: bytes, chunks: int = 99, **job: Any) -> list[Any]:
        """Prefill a prompt, or only its first chunks."""
        seen: list[Any] = []
        asked = PrefillJob(
            request_id=name, token_ids=ids, method=method_spec("dense"), decode_worker=self.worker.name, **job
        )
        async for reference in self.group.head.prefill.remote(asked):
            seen.append(await reference)
            if sum(isinstance(event, ChunkRead) for event in seen) >= chunks:
                break
        return seen

    async def answer(self, name: str) -> list[int]:
        job = GenerateJob(request_id=name, sampling=Sampling(max_tokens=NEW, ignore_eos=True))
        stream = self.decode.generate.options(num_returns="streaming").remote(job)
        events = [await reference async for reference in stream]
        return [event.token_id for event in events if isinstance(event, Token)]

    async def used(self) -> int:
        stats = await self.decode.stats.remote()
        return int(stats.pages_total - stats.pages_free)

    async def whole(self) -> None:
        """Wait until health checks have replaced lost actors."""

        async def alive() -> bool:
            await self.worker.check_health()
            await self.group.check_health()
            await self.decode.stats.remote()
            await self.group.head.stats.remote()
            return not await self.group.head.check.remote()

        await until(alive)


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                if await true():
                    return
            except (RayError, ValueError):
                pass
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def pair(cluster: Any, model: ModelSpec) -> Iterator[Pair]:
    handoff = HandoffConfig(transport="mapped")
    worker = DecodeReplica(model, DECODE, handoff)
    group = PrefillGroup(model, PREFILL, handoff)
    yield Pair(cluster, worker, group)
    group.stop()
    worker.stop()


@pytest.fixture(scope="module")
def expected(model: ModelSpec) -> tuple[bytes, list[int]]:
    """Return a prompt, and the answer of an engine in this process that gets the KV as messages."""
    ids, directory = random_ids(TOKENS), Path(model.path)

    async def answer() -> list[int]:
        engine = DecodeEngine("decode:here", part(directory, 0, 1), DECODE, reader=InProcessReader)
        await engine.start()
        await engine.reserve(Reservation(request_id="a", owner="me", new_tokens=TOKENS, max_tokens=NEW))
        async with group(directory, Line(engine), stages=1) as controller:
            asked = {"method": method_spec("dense"), "decode_worker": "decode:here"}
            async for _ in controller.prefill(PrefillJob(request_id="a", token_ids=ids, **asked)):
                pass
        job = GenerateJob(request_id="a", sampling=Sampling(max_tokens=NEW, ignore_eos=True))
        events = [event async for event in engine.generate(job)]
        await engine.close()
        return [event.token_id for event in events if isinstance(event, Token)]

    return ids, asyncio.run(answer())


async def test_mapped_kv_gives_the_same_answer_as_sent_kv_without_copies(
    pair: Pair, expected: tuple[bytes, list[int]]
) -> None:
    ids, answer = expected
    await pair.whole()
    await pair.reserve("a")
    done = (await pair.read("a", ids))[-1]
    assert isinstance(done, PrefillDone) and done.report.handoff_bytes == 0
    assert await pair.answer("a") == answer
    assert await pair.used() == 0


async def test_stage_resumes_after_a_cached_prefix_without_fetching_kv(
    pair: Pair, expected: tuple[bytes, list[int]]
) -> None:
    ids, answer = expected
    await pair.whole()
    known = np.frombuffer(ids, "<u4").tolist()[: TOKENS // 2 // BLOCK * BLOCK]
    start = len(known)
    await pair.reserve("shorter", start, key=key_of(known))
    await pair.read("shorter", packed(known))
    await pair.answer("shorter")
    key = key_of(np.frombuffer(ids, "<u4").tolist())
    assert (await pair.decode.find_prefix.remote(key)).tokens == start
    await pair.reserve("longer", TOKENS - start, key=key, prefix_tokens=start)
    done = (await pair.read("longer", ids, start=start))[-1]
    assert isinstance(done, PrefillDone) and "kv_fetch" not in done.report.critical
    assert await pair.answer("longer") == answer
    assert await pair.used() == 0


async def test_concurrent_prompts_get_their_own_kv(pair: Pair, expected: tuple[bytes, list[int]]) -> None:
    ids, answer = expected
    await pair.whole()
    others = [np.frombuffer(ids, "<u4")[::-1].tobytes(), ids, ids]
    names = [f"side{n}" for n in range(len(others))]
    await asyncio.gather(*map(pair.reserve, names))
    await asyncio.gather(*map(pair.read, names, others))
    answers = await asyncio.gather(*map(pair.answer, names))
    assert answers[1] == answers[2] == answer != answers[0]
    assert await pair.used() == 0


async def test_prompt_resumes_on_mapped_kv_after_its_stage_died(
    pair: Pair, expected: tuple[bytes, list[int]]
) -> None:
    ids, answer = expected
    await pair.whole()
    decode = pair.worker.name
    await pair.reserve("b")
    await pair.read("b", ids, chunks=2)
    stage = pair.group._stages[0]
    os.kill(await stage.pulse.options(concurrency_group="notices").remote(), signal.SIGKILL)
    start = await pair.decode.resume.remote("b", range(0, TOKENS, CHUNK), 1)
    assert start >= 2 * CHUNK
    await pair.whole()
    assert pair.worker.name == decode
    await pair.read("b", ids, start=start, attempt=1)
    assert await pair.answer("b") == answer
    assert await pair.used() == 0


async def test_cancelled_prompt_frees_its_pages(pair: Pair, expected: tuple[bytes, list[int]]) -> None:
    ids, answer = expected
    await pair.whole()
    await pair.reserve("c")
    await pair.read("c", ids, chunks=1)
    await pair.decode.cancel.remote("c")
    assert await pair.used() == 0
    await pair.reserve("d")
    await pair.read("d", ids)
    assert await pair.answer("d") == answer


async def test_dead_decode_worker_ends_its_stage_and_both_restart(
    pair: Pair, expected: tuple[bytes, list[int]]
) -> None:
    ids, answer = expected
    await pair.whole()
    first = pair.worker.name
    stage = pair.group._stages[0]
    pid = await stage.pulse.options(concurrency_group="notices").remote()
    pair.ray.kill(pair.decode)
    await until(lambda: gone(pid))
    await pair.whole()
    assert pair.worker.name != first
    await pair.reserve("e")
    await pair.read("e", ids)
    assert await pair.answer("e") == answer
    assert await pair.used() == 0


async def test_stage_finds_the_new_decode_worker_if_the_old_one_hangs(
    pair: Pair, expected: tuple[bytes, list[int]]
) -> None:
    """The stage is replaced, too, and must not wait for an answer of the worker that hangs."""

    class Hanging:
        def exported_memory(self, pairing: str) -> None:
            time.sleep(HANG_S)

    ids, answer = expected
    await pair.whole()
    options = {"name": f"{DECODE_PREFIX}hangs", "namespace": NAMESPACE, "num_cpus": 0}
    hanging = pair.ray.remote(Hanging).options(**options).remote()
    stage = pair.group._stages[0]
    os.kill(await stage.pulse.options(concurrency_group="notices").remote(), signal.SIGKILL)
    await pair.whole()
    await pair.reserve("f")
    await pair.read("f", ids)
    assert await pair.answer("f") == answer
    pair.ray.kill(hanging)


async def test_stage_sent_to_another_decode_worker_ends_without_writing(
    pair: Pair, model: ModelSpec, expected: tuple[bytes, list[int]]
) -> None:
    """After a worker that hangs is replaced, the stage still maps the old worker's memory."""
    ids, answer = expected
    await pair.whole()
    pid = await pair.group._stages[0].pulse.options(concurrency_group="notices").remote()
    first = pair.worker
    pair.worker = await asyncio.to_thread(DecodeReplica, model, DECODE, HandoffConfig(transport="mapped"))
    try:
        await pair.reserve("g")
        with pytest.raises(RayError):
            await pair.read("g", ids)
        await until(lambda: gone(pid))
    finally:
        first, pair.worker = pair.worker, first
        first.stop()
    await pair.whole()
    await pair.reserve("h")
    await pair.read("h", ids)
    assert await pair.answer("h") == answer


async def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()
