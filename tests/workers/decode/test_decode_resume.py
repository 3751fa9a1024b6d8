"""Tests resumed prompts: a decode worker keeps a prompt's KV when the prefill group dies, and sends it to the
next group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deltafront.workers.kv.arrival import ArrivalError, KVArrival
from deltafront.workers.kv.cache import KVCacheError
from deltafront.workers.kv.handoff.protocols import HandoffError
from deltafront.workers.messages.events import FinishReason
from deltafront.workers.messages.requests import DecodeFailed, GenerateJob, KeepSession, Sampling
from deltafront.workers.messages.stages import FirstLogits, KVAnnouncement, KVRange

from ..conftest import LAYERS
from ..prompts import SHORT

IDS = [(7 * i) % 198 for i in range(150)]


def arrival_of(*written: tuple[int, int, int], layers: int = 2, tokens: int = 100) -> KVArrival:
    """Make an arrival with these ranges written: (layer, start, tokens)."""
    arrival = KVArrival(range(layers), tokens)
    for part in written:
        assert arrival.claim(*part)
        arrival.written(*part)
    return arrival


def test_resumes_where_every_layers_kv_has_arrived() -> None:
    arrival = arrival_of((0, 0, 32), (0, 32, 32), (0, 64, 36), (1, 0, 32), (1, 32, 32))
    assert arrival.claim(1, 64, 36), "announced, and still on its way"
    assert arrival.resume_point([32, 64, 100]) == 64
    assert arrival.resume_point([32]) == 32
    assert arrival.resume_point([16, 48, 96]) == 0, "no range ends there"
    assert arrival.resume_point([]) == 0
    gap = arrival_of((0, 0, 32), (0, 64, 36), (1, 0, 32), (1, 32, 32), (1, 64, 36))
    assert gap.resume_point([32, 64, 100]) == 32
    assert arrival_of((0, 32, 32), (1, 32, 32)).resume_point([64]) == 0


def test_accepts_kv_after_the_resume_point_again() -> None:
    arrival = arrival_of((0, 0, 32), (0, 32, 32), (1, 0, 32))
    arrival.claim(1, 32, 32)
    rest = arrival.until(32)
    assert rest._count == 2 * 32
    assert not rest.claim(0, 0, 32), "an exact repetition of what is here"
    with pytest.raises(ArrivalError, match="overlaps"):
        rest.claim(0, 16, 32)
    assert rest.claim(0, 32, 64) and rest.claim(1, 32, 32), "also in other pieces"


async def announce(run: Any, pieces: list[KVAnnouncement]) -> None:
    for piece in pieces:
        await run.engine.announce(piece)


async def test_resumed_prompt_answers_as_an_uninterrupted_one(bench: Callable[..., Any]) -> None:
    run = await bench()
    whole = await run.ask("whole", IDS, SHORT)
    prompt = run.prefill(IDS)
    await run.reserve("a", len(IDS), 8)
    used = run.used
    await announce(run, run.pieces("a", prompt)[: 3 * LAYERS + 2])
    await run.engine.first_logits(FirstLogits(request_id="a", logits=np.zeros(199, np.float32)))
    assert await run.engine.resume("a", [32, 64, 96, 128], 1) == 96
    assert run.used == used, "its pages stay"
    await announce(run, run.pieces("a", prompt, attempt=1))
    await run.engine.first_logits(FirstLogits(request_id="a", logits=prompt.logits, attempt=1))
    answer = await run.collect(GenerateJob(request_id="a", sampling=SHORT))
    assert answer.ids == whole.ids
    assert run.used == 0


@pytest.mark.parametrize("sampling", [SHORT, replace(SHORT, temperature=1.0, seed=5)])
@pytest.mark.parametrize("answered", [1, 3, 70])
async def test_answer_resumes_after_the_tokens_already_generated(
    bench: Callable[..., Any], sampling: Sampling, answered: int
) -> None:
    """Another worker gets the prompt's KV and prefills the answer's tokens in chunks of 48. It does not use
    the prompt's logits."""
    run, left = await bench(), sampling.max_tokens
    whole = await run.ask("whole", IDS, replace(sampling, max_tokens=answered + left))
    await run.reserve("rest", len(IDS), left, resume_tokens=answered)
    prompt = run.prefill(IDS)
    await announce(run, run.pieces("rest", prompt))
    await run.engine.first_logits(FirstLogits(request_id="rest", logits=np.zeros_like(prompt.logits)))
    said = np.asarray(whole.ids[:answered], dtype="<u4").tobytes()
    rest = await run.collect(GenerateJob(request_id="rest", sampling=sampling, extend_ids=said))
    assert rest.ids == whole.ids[answered:]
    assert rest.finish.report.append_prefill > 0


async def test_lost_kv_transfer_fails_the_request_unless_prefill_resumes(bench: Callable[..., Any]) -> None:
    """A stage dies with announced KV: the owner of the arrays is gone."""
    run = await bench()
    prompt = run.prefill(IDS)

    async def gone() -> Any:
        raise RuntimeError("the object's owner has died")

    async def half(name: str) -> None:
        pieces = run.pieces(name, prompt)
        await run.reserve(name, len(IDS), 8)
        await announce(run, pieces[:LAYERS])
        lost = pieces[LAYERS]
        with pytest.raises(HandoffError, match="is lost: RuntimeError: the object's owner has died"):
            await run.engine.announce(
                KVAnnouncement(
                    request_id=name, layer=lost.layer, start=lost.start, tokens=lost.tokens, payload=gone()
                )
            )

    for name in ("asked", "kept"):
        await half(name)
    answer = await run.collect(GenerateJob(request_id="asked", sampling=SHORT))
    assert answer.finish.reason is FinishReason.NO_KV and "did not arrive" in answer.finish.message
    with pytest.raises(DecodeFailed, match="did not arrive"):
        await run.engine.keep(KeepSession(request_id="kept"))
    assert run.used == 0
    await half("resumed")
    assert await run.engine.resume("resumed", [32, 64], 1) == 32
    await announce(run, run.pieces("resumed", prompt, attempt=1)[LAYERS:])
    await run.engine.first_logits(FirstLogits(request_id="resumed", logits=prompt.logits, attempt=1))
    assert len((await run.collect(GenerateJob(request_id="resumed", sampling=SHORT))).ids) == 8


def wrong(piece: KVAnnouncement) -> KVAnnouncement:
    """Return the announcement with wrong KV, as a failed group might send it."""
    return replace(piece, payload=tuple(np.full_like(x, 9.0) for x in piece.payload))


def pulled_late(run: Any, piece: KVAnnouncement, release: asyncio.Event) -> asyncio.Task[None]:
    """Announce KV whose transfer ends only after `release`. If the payload is None, the transfer then
    fails."""

    async def late() -> Any:
        await release.wait()
        if piece.payload is None:
            raise RuntimeError("its owner has died")
        return piece.payload

    return asyncio.create_task(run.engine.announce(replace(piece, payload=late())))


@pytest.mark.usefixtures("single_rank")
async def test_kv_in_flight_from_an_abandoned_prefill_is_not_written(
    bench: Callable[..., Any],
) -> None:
    """Two transfers run while the request is resumed. Later one ends and the other fails."""
    run = await bench()
    whole = await run.ask("whole", IDS, SHORT)
    prompt, release = run.prefill(IDS), asyncio.Event()
    first, second, *_ = run.pieces("a", prompt)
    await run.reserve("a", len(IDS), 8)
    late = [pulled_late(run, one, release) for one in (wrong(first), replace(second, payload=None))]
    await asyncio.sleep(0)
    assert await run.engine.resume("a", [32], 1) == 0
    await announce(run, run.pieces("a", prompt, attempt=1))
    release.set()
    outcomes = await asyncio.gather(*late, return_exceptions=True)
    assert outcomes[0] is None and isinstance(outcomes[1], HandoffError)
    await run.engine.first_logits(FirstLogits(request_id="a", logits=prompt.logits, attempt=1))
    assert (await run.collect(GenerateJob(request_id="a", sampling=SHORT))).ids == whole.ids


async def test_ignores_kv_and_logits_of_an_abandoned_prefill(bench: Callable[..., Any]) -> None:
    run = await bench()
    whole = await run.ask("whole", IDS, SHORT)
    prompt = run.prefill(IDS)
    await run.reserve("a", len(IDS), 8)
    assert await run.engine.resume("a", [32], 1) == 0
    assert await run.engine.resume("a", [32], 2) == 0
    for attempt in (0, 1):
        await run.engine.announce(wrong(run.pieces("a", prompt, attempt=attempt)[0]))
        await run.engine.first_logits(
            FirstLogits(request_id="a", logits=np.ones_like(prompt.logits), attempt=attempt)
        )
    await announce(run, run.pieces("a", prompt, attempt=2))
    await run.engine.first_logits(FirstLogits(request_id="a", logits=prompt.logits, attempt=2))
    assert (await run.collect(GenerateJob(request_id="a", sampling=SHORT))).ids == whole.ids


@pytest.mark.usefixtures("single_rank")
async def test_late_kv_of_an_abandoned_prefill_starts_no_second_decode(bench: Callable[..., Any]) -> None:
    """The KV arrives while the worker prefills appended tokens."""
    run = await bench(append_chunk_tokens=16)
    prompt, release = run.prefill(IDS), asyncio.Event()
    await run.reserve("a", len(IDS), 8, resume_tokens=200)
    late = pulled_late(run, run.pieces("a", prompt)[0], release)
    await asyncio.sleep(0)
    assert await run.engine.resume("a", [32], 1) == 0
    await announce(run, run.pieces("a", prompt, attempt=1))
    await run.engine.first_logits(FirstLogits(request_id="a", logits=prompt.logits, attempt=1))
    said = np.full(200, 5, dtype="<u4").tobytes()
    answering = asyncio.create_task(
        run.collect(GenerateJob(request_id="a", sampling=SHORT, extend_ids=said, answered_tokens=200))
    )
    while not run.engine._scheduler._appending:
        await asyncio.sleep(0)
    release.set()
    await late
    assert len((await answering).ids) == 8 and not run.engine.fault


async def test_only_a_prompt_in_prefill_can_be_resumed(bench: Callable[..., Any]) -> None:
    run = await bench()
    session = (await run.ask("s", IDS, SHORT, keep_tokens=len(IDS), keep_ttl_s=60.0)).first.session
    await run.engine.renew(["s"])
    await run.reserve("more", 5, 8, session_id=session.session_id)
    await run.reserve("ended", 40, 8)
    await run.engine.cancel("ended")
    for name in ("nobody", "more", "ended"):
        with pytest.raises(DecodeFailed, match=f"{name} is not being read"):
            await run.engine.resume(name, [32], 1)
    await run.engine.cancel("more")


async def test_stage_fetches_the_kv_that_arrived_at_the_decode_worker(bench: Callable[..., Any]) -> None:
    run = await bench()
    prompt = run.prefill(IDS)
    await run.reserve("a", len(IDS), 8)
    await announce(run, run.pieces("a", prompt))
    for layer, start, tokens in ((0, 0, 150), (2, 5, 100), (LAYERS - 1, 149, 1)):
        back = await run.engine.kv(KVRange(request_id="a", layer=layer, start=start, tokens=tokens))
        for array, whole in zip((back.k, back.v), prompt.kv[layer], strict=True):
            assert np.array_equal(array, whole[start : start + tokens])
    for start, tokens in ((0, 161), (-1, 5), (3, 0)):
        with pytest.raises(KVCacheError, match="are not in the 10 pages"):
            await run.engine.kv(KVRange(request_id="a", layer=0, start=start, tokens=tokens))
    with pytest.raises(DecodeFailed, match="nobody is not being read"):
        await run.engine.kv(KVRange(request_id="nobody", layer=0, start=0, tokens=1))
    await run.engine.cancel("a")
