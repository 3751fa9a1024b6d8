"""Answers that are read again while the worker is idle (`RequestOptions.shadow`)."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from deltafront.workers.messages.events import FinishReason, PromptLogprobs
from deltafront.workers.messages.requests import (
    GenerateJob,
    RefusalReason,
    RequestOptions,
    Reservation,
    Reserved,
    Sampling,
)

PROMPT = [(7 * i * i + 3) % 190 for i in range(131)]
SHADOW = RequestOptions(prompt_logprobs=1, logprobs_from=120, shadow=True)


def reservation(name: str, tokens: int, options: RequestOptions = SHADOW, **more: Any) -> Reservation:
    given = {"owner": "", "new_tokens": tokens, "max_tokens": 0, "options": options, "reads_rest": True}
    return Reservation(request_id=name, **(given | more))


async def read(run: Any, name: str, ids: list[int]) -> tuple[list[Any], Any]:
    packed = np.asarray(ids, dtype="<u4").tobytes()
    job = GenerateJob(request_id=name, sampling=Sampling(max_tokens=0), extend_ids=packed)
    events = [event async for event in run.engine.generate(job)]
    return [t for e in events if isinstance(e, PromptLogprobs) for t in e.tokens], events[-1]


async def test_prompt_logprobs_skip_chunks_before_logprobs_from(bench: Any) -> None:
    """Chunks have 48 tokens, so position 120 is in the one after token 96."""
    run = await bench()
    assert isinstance(await run.engine.reserve(reservation("a", len(PROMPT))), Reserved)
    found, finish = await read(run, "a", PROMPT)
    await run.engine.reserve(reservation("b", len(PROMPT), RequestOptions(prompt_logprobs=1)))
    every, _ = await read(run, "b", PROMPT)
    assert finish.reason is FinishReason.LENGTH
    assert [token.index for token in every] == list(range(1, 131))
    assert found == every[96:]


@pytest.mark.parametrize("after", ["reserved", "cancelled"])
async def test_shadow_request_is_refused_while_another_request_exists(bench: Any, after: str) -> None:
    run = await bench()
    await run.reserve("a", 20, 5)
    if after == "cancelled":
        await run.engine.cancel("a")
    answer = await run.engine.reserve(reservation("b", len(PROMPT)))
    if after == "cancelled":
        assert isinstance(answer, Reserved)
    else:
        assert answer.reason is RefusalReason.BUSY
    for name in "ab":
        await run.engine.cancel(name)


@pytest.mark.parametrize("wait", [False, True])
async def test_request_ends_a_shadow_request_and_gets_its_pages(bench: Any, wait: bool) -> None:
    """The shadow has more than half of the pages, and computes when the request comes."""
    run, ids = await bench(cache_tokens=640, append_chunk_tokens=16), PROMPT * 3
    assert isinstance(await run.engine.reserve(reservation("shadow", len(ids))), Reserved)
    reading = asyncio.create_task(read(run, "shadow", ids))
    async with asyncio.timeout(60):
        while not run.engine._scheduler.running:
            await asyncio.sleep(0)
    answer = await run.engine.reserve(
        reservation("caller", len(ids), RequestOptions(prompt_logprobs=0), wait=wait)
    )
    assert isinstance(answer, Reserved)
    found, finish = await reading
    assert (found, finish.reason, finish.message) == ([], FinishReason.CANCELLED, "another request came")
    await run.engine.cancel("caller")


async def test_shadow_request_counts_for_no_caller_and_caches_nothing(bench: Any) -> None:
    run = await bench()
    await run.engine.reserve(reservation("a", len(PROMPT)))
    assert [use.owner for use in (await run.engine.stats()).uses] == [""]
    await read(run, "a", PROMPT)
    assert (await run.engine.stats()).pages_remembered == 0
