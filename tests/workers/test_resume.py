"""Tests, with real stages and a real decode engine, that a prompt whose group is lost resumes in another one
with the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafront.kernels import options
from deltafront.kernels.methods import PRESETS, MethodSpec, method_spec, resume_step
from deltafront.service.request.run.prefix import resume_at
from deltafront.tests.workers.in_process import InProcessReader, local_controller
from deltafront.workers.decode.engine import DecodeEngine
from deltafront.workers.kv.handoff.protocols import HandoffError
from deltafront.workers.messages.events import ChunkRead, PrefillDone
from deltafront.workers.messages.requests import GenerateJob, PrefillFailed, PrefillJob, Sampling
from deltafront.workers.messages.stages import FirstLogits, HostKV, KVAnnouncement, KVRange
from deltafront.workers.prefill.group.controller import PrefillController
from deltafront.workers.settings import ModelSpec, PrefillConfig

from .conftest import LAYERS
from .keys import DENSE, key_of
from .prompts import packed

TOKENS, CHUNK = 700, 128
IDS = np.asarray([(11 * i + i // 7) % 198 for i in range(TOKENS)], dtype="<u4").tobytes()
SAMPLING = Sampling(max_tokens=12, ignore_eos=True)
METHODS = [
    method_spec("dense"),
    *(method_spec(name, {"min_tokens": 0}) for name in ("dpxa", "delta_kv", "delta_xattention")),
    method_spec("streaming+delta", {"min_tokens": 0, "window": 256}),
]


class Line:
    """Connects the stages' threads and an engine. `broken`: KV cannot be fetched."""

    def __init__(self, engine: DecodeEngine) -> None:
        self.engine = engine
        self.loop = asyncio.get_running_loop()
        self.broken = False
        self.fetched: list[KVRange] = []

    def _ask(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def announce(self, announcement: KVAnnouncement) -> None:
        self._ask(self.engine.announce(announcement))

    def first_logits(self, message: FirstLogits) -> None:
        self._ask(self.engine.first_logits(message))

    def fetch(self, decode_worker: str, wanted: Iterable[KVRange]) -> Iterator[tuple[KVRange, HostKV]]:
        for one in wanted:
            if self.broken:
                raise HandoffError(f"{decode_worker} gave no KV back")
            self.fetched.append(one)
            yield one, self._ask(self.engine.kv(one))


@asynccontextmanager
async def group(directory: Path, line: Line, stages: int = 2) -> AsyncIterator[PrefillController]:
    config = PrefillConfig(stages=stages, cache_tokens=1024, chunk_tokens=CHUNK, stream_lease_s=600.0)
    made = local_controller(ModelSpec(path=str(directory), dtype="float32"), config, line, line)
    try:
        yield made
    finally:
        await made.stop()


def job_of(name: str, method: MethodSpec, start: int = 0, attempt: int = 0) -> PrefillJob:
    return PrefillJob(
        request_id=name,
        token_ids=IDS,
        method=method,
        decode_worker="decode:test",
        start=start,
        attempt=attempt,
    )


async def read(controller: PrefillController, job: PrefillJob, until: int = TOKENS) -> list[Any]:
    """Prefill a prompt and return its events. Cancels it once `until` tokens are done."""
    events: list[Any] = []
    stream = controller.prefill(job)
    async for event in stream:
        events.append(event)
        if isinstance(event, ChunkRead) and until <= event.tokens_done < TOKENS:
            break
    await stream.aclose()
    return events


async def held(engine: DecodeEngine, name: str) -> list[np.ndarray]:
    """Return the K and V of each layer and the first token's logits that an engine has for a request."""
    parts = [
        await engine.kv(KVRange(request_id=name, layer=layer, start=0, tokens=TOKENS))
        for layer in range(LAYERS)
    ]
    request = engine._requests.find(name)
    assert request is not None and request.inbox.logits_V is not None
    return [*(x for part in parts for x in (part.k, part.v)), request.inbox.logits_V]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_resumed_prompt_has_the_same_kv_and_logits_bit_for_bit(
    bench: Callable[..., Any], tiny_llama: Path, method: MethodSpec
) -> None:
    run = await bench(reader=InProcessReader)
    line = Line(run.engine)
    for name in ("whole", "resumed"):
        await run.reserve(name, TOKENS, SAMPLING.max_tokens)
    async with group(tiny_llama, line) as controller:
        await read(controller, job_of("whole", method))
        first = await read(controller, job_of("resumed", method), until=4 * CHUNK)
    points = [event.tokens_done for event in first if isinstance(event, ChunkRead)]
    assert await run.engine.resume("resumed", points, 1) == 4 * CHUNK
    async with group(tiny_llama, line, stages=3) as other:
        events = await read(other, job_of("resumed", method, start=4 * CHUNK, attempt=1))
    assert [event.tokens_done for event in events[:-1]] == [5 * CHUNK, TOKENS]
    assert isinstance(events[-1], PrefillDone)
    assert {one.layer for one in line.fetched} == set(range(LAYERS))
    assert sum(one.tokens for one in line.fetched) == LAYERS * 4 * CHUNK
    both = [await held(run.engine, name) for name in ("whole", "resumed")]
    assert all(np.array_equal(one, other) for one, other in zip(*both, strict=True))
    answers = [
        await run.collect(GenerateJob(request_id=name, sampling=SAMPLING)) for name in ("whole", "resumed")
    ]
    assert answers[0].ids == answers[1].ids and len(answers[0].ids) == SAMPLING.max_tokens


async def test_report_of_a_resumed_prompt_counts_only_the_rest(
    bench: Callable[..., Any], tiny_llama: Path
) -> None:
    run = await bench(reader=InProcessReader)
    line = Line(run.engine)
    await run.reserve("a", TOKENS, 1)
    async with group(tiny_llama, line) as controller:
        first = await read(controller, job_of("a", METHODS[0]), until=4 * CHUNK)
        assert await run.engine.resume("a", [4 * CHUNK], 1) == 4 * CHUNK
        second = await read(controller, job_of("a", METHODS[0], start=4 * CHUNK, attempt=1))
        whole = await read(controller, job_of("b", METHODS[0]))
    reports = [first[-1].so_far, second[-1].report, whole[-1].report]
    tiles = [sum(layer.causal for layer in report.density) for report in reports]
    assert tiles[0] + tiles[1] == tiles[2]
    assert reports[0].handoff_bytes + reports[1].handoff_bytes == reports[2].handoff_bytes
    await run.engine.cancel("a")


async def test_lost_kv_fails_the_resumed_request_but_not_the_group(
    bench: Callable[..., Any], tiny_llama: Path
) -> None:
    run = await bench(reader=InProcessReader)
    line = Line(run.engine)
    await run.reserve("a", TOKENS, SAMPLING.max_tokens)
    async with group(tiny_llama, line) as controller:
        await read(controller, job_of("a", METHODS[0]), until=4 * CHUNK)
        line.broken = True
        start = await run.engine.resume("a", [2 * CHUNK, 4 * CHUNK], 1)
        with pytest.raises(PrefillFailed, match="gave no KV back"):
            await read(controller, job_of("a", METHODS[0], start=start, attempt=1))
        assert await controller.stage_pages() == [0, 0]
        line.broken = False
        start = await run.engine.resume("a", [2 * CHUNK], 2)
        assert start == 2 * CHUNK
        await read(controller, job_of("a", METHODS[0], start=start, attempt=2))
    assert len((await run.collect(GenerateJob(request_id="a", sampling=SAMPLING))).ids) == SAMPLING.max_tokens


@pytest.mark.parametrize("start", [-128, 64, TOKENS, 768])
async def test_refuses_to_resume_at_an_impossible_token(
    bench: Callable[..., Any], tiny_llama: Path, start: int
) -> None:
    run = await bench(reader=InProcessReader)
    async with group(tiny_llama, Line(run.engine), stages=1) as controller:
        with pytest.raises(PrefillFailed, match=f"cannot be resumed at token {start}"):
            await read(controller, replace(job_of("a", METHODS[0]), start=start))


# --- after a cached prefix --------------------------------------------------------------------------------

LONG_IDS = [(11 * i + i // 7 + i // 130) % 198 for i in range(1000)]
SERVED = [name for name, preset in PRESETS.items() if preset.module == options.__name__]
EVERY_METHOD = [
    DENSE,
    method_spec("dpxa"),
    *(method_spec(name, {"min_tokens": 0}) for name in SERVED if name != "dense"),
    *(method_spec(f"{name}+delta", {"min_tokens": 0}) for name in ("dpxa", "streaming", "delta_kv")),
    method_spec("streaming+delta", {"min_tokens": 0, "gamma": 96}),
]


def read_job(name: str, ids: list[int], method: MethodSpec, start: int = 0) -> PrefillJob:
    given = {"token_ids": packed(ids), "method": method, "decode_worker": "decode:test"}
    return PrefillJob(request_id=name, start=start, **given)


async def answer(
    run: Any, group: PrefillController, name: str, ids: list[int], method: MethodSpec, salt: str
) -> Any:
    """Prefill a prompt in a group, from the end of its cached prefix, and answer it. Returns the number of
    cached tokens, the prompt's KV, and the answer."""
    key = key_of(ids, method=method, salt=salt)
    found = await run.engine.find_prefix(key)
    start = resume_at(found.tokens if found else 0, len(ids), method)
    await run.reserve(name, len(ids) - start, SAMPLING.max_tokens, key=key, prefix_tokens=start)
    async for _ in group.prefill(read_job(name, ids, method, start)):
        pass
    parts = [
        await run.engine.kv(KVRange(request_id=name, layer=layer, start=0, tokens=len(ids)))
        for layer in range(LAYERS)
    ]
    done = await run.collect(GenerateJob(request_id=name, sampling=SAMPLING))
    return start, [side for part in parts for side in (part.k, part.v)], done.ids


@pytest.mark.parametrize("method", EVERY_METHOD, ids=lambda method: f"{method.name} {dict(method.options)}")
async def test_prompt_after_a_cached_prefix_equals_a_cold_prefill(
    bench: Callable[..., Any], tiny_llama: Path, method: MethodSpec
) -> None:
    """Covers every served method: its tiles may depend on where a prompt ends, but cached KV must not. The
    shorter prompt ends at a block's boundary, one token before and one after. Each has its own salt, so that
    the longer prompt finds only its KV."""
    run, cold = await bench(reader=InProcessReader), await bench(reader=InProcessReader)
    async with group(tiny_llama, Line(run.engine), 2) as near, group(tiny_llama, Line(cold.engine), 2) as far:
        starts = []
        _, wanted_kv, wanted = await answer(cold, far, "cold", LONG_IDS, method, "")
        for end in (767, 768, 769):
            salt = f"after {end}"
            await answer(run, near, f"short {end}", LONG_IDS[:end], method, salt)
            start, kv, ids = await answer(run, near, f"long {end}", LONG_IDS, method, salt)
            starts.append(start)
            assert ids == wanted
            assert all(np.array_equal(one, other) for one, other in zip(kv, wanted_kv, strict=True))
        step = resume_step(method)
        assert all(0 < start <= 768 and start % step == 0 for start in starts)
