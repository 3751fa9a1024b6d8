"""Tests a decode worker's refusals and failures. Its pages always return to the pool."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from deltafront.workers.decode.decode_attention import PageSelectionError
from deltafront.workers.decode.runner import DecodeRunner
from deltafront.workers.kv.handoff.object_store import ObjectStoreReader
from deltafront.workers.messages.events import FinishReason, Token
from deltafront.workers.messages.requests import (
    GenerateJob,
    RefusalReason,
    Refused,
    RequestOptions,
    Reservation,
    Sampling,
)
from deltafront.workers.messages.stages import FirstLogits
from deltafront.workers.messages.states import OwnerUse

from ..prompts import SHORT, Clock, ids_of, packed

LONG = Sampling(max_tokens=400, ignore_eos=True)


async def refusal(run: Any, **reservation: Any) -> Refused:
    given = {"request_id": "x", "owner": "me", "new_tokens": 10, "max_tokens": 4} | reservation
    used = run.used
    answer = await run.engine.reserve(Reservation(**given))
    assert isinstance(answer, Refused), answer
    assert run.used <= used, "a refusal takes nothing"
    return answer


# --- refusals -------------------------------------------------------------------------------------------


async def test_refused_reservation_has_a_reason_and_takes_no_page(bench: Any) -> None:
    run = await bench(cache_tokens=640)
    await run.reserve("a", 300, 20)
    assert (await refusal(run, request_id="a")).reason is RefusalReason.DUPLICATE
    full = await refusal(run, new_tokens=310, max_tokens=11)
    assert (full.reason, full.needed, full.free) == (RefusalReason.PAGES, 21, 20)
    large = await refusal(run, new_tokens=630, max_tokens=11)
    assert (large.reason, large.needed) == (RefusalReason.TOO_LARGE, 41)
    assert (await refusal(run, new_tokens=1000, max_tokens=25)).reason is RefusalReason.POSITIONS
    assert (await refusal(run, session_id="test.none")).reason is RefusalReason.NO_SESSION
    for selection, words in (("delta", "calibrated"), ("most", "unknown page selection")):
        refused = await refusal(run, options=RequestOptions(page_selection=selection))
        assert refused.reason is RefusalReason.SELECTION and words in refused.message
    for senseless in ({"new_tokens": 0}, {"new_tokens": -1}, {"max_tokens": -1}, {"keep_tokens": 11}):
        with pytest.raises(ValueError, match="tokens"):
            await refusal(run, **senseless)
    await run.engine.cancel("a")
    assert run.used == 0


async def test_context_limit_counts_the_sessions_tokens(bench: Any) -> None:
    run = await bench(cache_tokens=4096)
    kept = (await run.ask("a", ids_of(500), SHORT, keep_tokens=500)).first.session.session_id
    reservation = {"session_id": kept, "new_tokens": 500}
    assert (await refusal(run, **reservation, max_tokens=25)).reason is RefusalReason.POSITIONS
    await run.reserve("fits", 500, 24, session_id=kept)


async def test_only_the_owner_uses_a_session_until_it_expires(bench: Any) -> None:
    clock = Clock()
    run = await bench(wall=clock, max_session_ttl_s=100.0)
    first = await run.ask("a", ids_of(40), SHORT, keep_tokens=40, keep_ttl_s=500.0)
    session = first.first.session.session_id
    assert first.first.session.expires == 1100.0, "the lease is capped"
    foreign = await refusal(run, owner="you", session_id=session)
    assert foreign.reason is RefusalReason.NO_SESSION
    assert not await run.engine.release_session(session, "you")
    await run.reserve("running", 5, 30, session_id=session)
    clock.now = 1100.0
    gone = await refusal(run, session_id=session)
    assert gone.reason is RefusalReason.NO_SESSION
    assert (await run.engine.stats()).sessions == 0
    assert run.used > 0, "the running request still holds the shared pages"
    job = GenerateJob(
        request_id="running",
        sampling=Sampling(max_tokens=30, ignore_eos=True),
        extend_ids=packed(ids_of(5)),
    )
    answer = await run.collect(job)
    assert len(answer.tokens) == 30
    assert run.used == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling": Sampling(max_tokens=9)}, "max_tokens 9"),
        ({"extend_ids": packed([1])}, "1 appended tokens, but 0 were reserved"),
        ({"keep_tokens": 41}, "keep_tokens 41"),
    ],
)
async def test_generate_job_that_contradicts_its_reservation_fails(
    bench: Any, change: dict[str, Any], words: str
) -> None:
    run = await bench()
    await run.reserve("a", 40, 8)
    answer = await run.collect(replace(GenerateJob(request_id="a", sampling=SHORT), **change))
    assert answer.finish.reason is FinishReason.FAILED
    assert words in answer.finish.message
    assert run.used == 0


async def test_appended_tokens_that_do_not_fit_fail_the_request(bench: Any) -> None:
    run = await bench()
    session = (await run.ask("a", ids_of(40), SHORT, keep_tokens=40)).first.session.session_id
    for name, count, ids, words in (
        ("none", 0, [], "at least one"),
        ("fewer", 3, [1, 2], "3 were reserved"),
        ("outside", 2, [1, 199], "outside the vocabulary"),
    ):
        await run.reserve(name, count, 8, session_id=session)
        answer = await run.collect(GenerateJob(request_id=name, sampling=SHORT, extend_ids=packed(ids)))
        assert answer.finish.reason is FinishReason.FAILED and words in answer.finish.message
    await run.reserve("answered", 40, 8, resume_tokens=1)
    answer = await run.collect(GenerateJob(request_id="answered", sampling=SHORT, extend_ids=packed([199])))
    assert "outside the vocabulary" in answer.finish.message
    with pytest.raises(ValueError, match="-1 resumed tokens after the prompt"):
        await run.reserve("fewer than none", 40, 8, resume_tokens=-1)
    with pytest.raises(ValueError, match="2 resumed tokens after the prompt"):
        await run.reserve("session", 4, 8, session_id=session, resume_tokens=2)


async def test_second_generate_job_or_one_without_reservation_fails(bench: Any) -> None:
    run = await bench()
    answer = await run.collect(GenerateJob(request_id="nobody", sampling=SHORT))
    assert answer.finish.reason is FinishReason.FAILED and "not reserved" in answer.finish.message
    await run.reserve("a", 40, 8)
    first = asyncio.create_task(run.collect(GenerateJob(request_id="a", sampling=SHORT)))
    await asyncio.sleep(0)
    second = await run.collect(GenerateJob(request_id="a", sampling=SHORT))
    assert "already generating" in second.finish.message
    await run.deliver("a", ids_of(40))
    assert len((await first).tokens) == 8


def test_refuses_to_start_with_settings_the_model_does_not_fit(tiny_stack: Any) -> None:
    from deltafront.workers.decode.engine import DecodeEngine
    from deltafront.workers.settings import DecodeConfig

    with pytest.raises(PageSelectionError, match="delta_layers names layer 6"):
        DecodeEngine("decode:x", tiny_stack, DecodeConfig(delta_layers=(6,)), reader=ObjectStoreReader)


# --- endings --------------------------------------------------------------------------------------------


async def test_deadline_ends_a_running_stream(bench: Any) -> None:
    clock = Clock()
    run = await bench(wall=clock)
    launch = run.engine._runner.launch

    def slower_once_late(rows: Any, masks: Any = ()) -> Any:
        if clock.now >= 1001.0:
            time.sleep(0.02)  # slow steps, so that the deadline is checked before 400 of them end
        return launch(rows, masks)

    run.engine._runner.launch = slower_once_late
    await run.reserve("a", 40, 400, deadline=1001.0)
    await run.deliver("a", ids_of(40))
    events = []
    async for event in run.engine.generate(GenerateJob(request_id="a", sampling=LONG)):
        events.append(event)
        if isinstance(event, Token) and event.index == 2:
            clock.now = 1001.0
    assert events[-1].reason is FinishReason.DEADLINE
    assert 0 < events[-1].completion_tokens < 400
    assert run.used == 0


async def test_cancels_requests_whose_lease_is_not_renewed(bench: Any) -> None:
    clock = Clock()
    run = await bench(clock=clock, stream_lease_s=10.0)
    await run.reserve("never-started", 40, 8)
    await run.reserve("renewed", 40, 8)
    await run.reserve("streaming", 40, 8)
    reading = asyncio.create_task(run.collect(GenerateJob(request_id="streaming", sampling=SHORT)))
    await asyncio.sleep(0)
    clock.now += 6.0
    await run.engine.renew(["renewed", "nobody"])
    await asyncio.sleep(0.25)
    assert not reading.done() and run.used == 9
    clock.now += 5.0
    answer = await reading
    assert answer.finish.reason is FinishReason.CANCELLED and "renewed" in answer.finish.message
    assert run.used == 3
    await run.deliver("renewed", ids_of(40))
    assert len((await run.collect(GenerateJob(request_id="renewed", sampling=SHORT))).tokens) == 8


async def test_lease_that_expired_during_a_pause_can_still_be_renewed(bench: Any) -> None:
    """The clock jumps, as after a pause of the whole process. The API server's renewals arrive right
    after."""
    clock = Clock()
    run = await bench(clock=clock, stream_lease_s=5.0)
    await run.reserve("renewed", 40, 8)
    await run.reserve("not", 40, 8)
    for _ in range(3):
        clock.now += 60.0
        run.engine._requests.expire()
        await run.engine.renew(["renewed"])
        for _tick in range(10):
            run.engine._requests.expire()
    assert run.used == 3
    await run.engine.cancel("renewed")


async def test_session_is_kept_only_if_the_api_server_got_the_last_event(bench: Any) -> None:
    """An API server that dies earlier has never told its client of the session."""
    clock = Clock()
    run = await bench(clock=clock, stream_lease_s=5.0)
    for name in ("heard", "unheard"):
        answer = await run.ask(name, ids_of(40), SHORT, keep_tokens=40, keep_ttl_s=60.0)
        assert answer.first.session is not None
    assert run.used == 6
    await run.engine.renew(["heard"])
    clock.now += 6.0
    for _tick in range(10):
        run.engine._requests.expire()
    assert run.used == 3
    assert (await run.engine.stats()).sessions == 1


async def test_worker_stats_count_each_owners_tokens_by_api_server(bench: Any) -> None:
    run = await bench()
    await run.ask("kept", ids_of(40), SHORT, keep_tokens=30, keep_ttl_s=60.0)
    await run.engine.renew(["kept"])
    await run.reserve("a", 40, 8, door="one")
    await run.reserve("b", 20, 0, door="one")
    await run.reserve("c", 10, 5, door="two")
    await run.reserve("d", 10, 5, owner="you", door="two")
    await run.reserve("resumed", 10, 5, door="two", resume_tokens=7)
    wanted = {
        OwnerUse(owner="me", door="", requests=0, tokens=30),
        OwnerUse(owner="me", door="one", requests=2, tokens=68),
        OwnerUse(owner="me", door="two", requests=2, tokens=37),
        OwnerUse(owner="you", door="two", requests=1, tokens=15),
    }
    assert set((await run.engine.stats()).uses) == wanted
    for name in (*"abcd", "resumed"):
        await run.engine.cancel(name)
    assert (await run.engine.stats()).uses == (OwnerUse(owner="me", door="", requests=0, tokens=30),)


async def test_session_and_its_running_request_count_shared_tokens_once(bench: Any) -> None:
    """While its answer streams, the request and its session have the same pages."""
    run = await bench()
    ids = ids_of(40)
    await run.reserve("a", 40, 30, keep_tokens=33, keep_ttl_s=60.0, door="one")
    prompt = run.prefill(ids)
    for piece in run.pieces("a", prompt):
        await run.engine.announce(piece)
    await run.engine.first_logits(FirstLogits(request_id="a", logits=prompt.logits))
    job = GenerateJob(request_id="a", sampling=Sampling(max_tokens=30, ignore_eos=True), keep_tokens=33)
    stream = run.engine.generate(job)
    first = await anext(stream)
    assert first.session is not None and first.session.tokens == 33
    assert set((await run.engine.stats()).uses) == {
        OwnerUse(owner="me", door="", requests=0, tokens=33),
        OwnerUse(owner="me", door="one", requests=1, tokens=37),
    }
    await run.engine.release_session(first.session.session_id, "me")
    assert set((await run.engine.stats()).uses) == {OwnerUse(owner="me", door="one", requests=1, tokens=70)}
    await stream.aclose()


@pytest.mark.usefixtures("single_rank")
async def test_repeated_step_failures_mark_the_worker_faulty(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await bench()
    run.may_fault = True

    def broken(self: DecodeRunner, rows: Any, masks: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(DecodeRunner, "launch", broken)
    for turn in range(3):
        assert not run.engine.fault
        answer = await run.ask(f"a{turn}", ids_of(40), SHORT)
        assert answer.finish.reason is FinishReason.FAILED and "no memory" in answer.finish.message
        assert len(answer.tokens) == 1
        assert run.used == 0
    assert "no memory" in run.engine.fault


async def test_running_streams_do_not_wait_for_a_long_extend(bench: Any) -> None:
    run = await bench(append_chunk_tokens=16)
    session = (await run.ask("a", ids_of(40), SHORT, keep_tokens=40)).first.session.session_id
    await run.reserve("running", 40, 400)
    await run.deliver("running", ids_of(40))
    stream = run.engine.generate(GenerateJob(request_id="running", sampling=LONG))
    for _ in range(3):
        await anext(stream)
    await run.reserve("long", 500, 4, session_id=session)
    job = GenerateJob(request_id="long", sampling=Sampling(max_tokens=4), extend_ids=packed(ids_of(500)))
    appending = asyncio.create_task(run.collect(job))
    during = 0
    while not appending.done():
        await anext(stream)
        during += 1
    assert during >= 500 // 16, "one decode step between any two chunks"
    await stream.aclose()
    assert len((await appending).tokens) == 4


@pytest.mark.parametrize("looks_ahead", [False, True])
async def test_random_cancels_leave_no_page_in_use(bench: Any, looks_ahead: bool) -> None:
    run = await bench(looks_ahead=looks_ahead, max_batch=4, cache_tokens=4096, append_chunk_tokens=16)
    chance = random.Random(3)
    session = (await run.ask("s", ids_of(50), SHORT, keep_tokens=50)).first.session.session_id
    prompts = {length: run.prefill(ids_of(length)) for length in (5, 33, 90)}
    endings: list[FinishReason] = []
    ended: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def life(name: str) -> None:
        length = chance.choice(list(prompts))
        on_session = chance.random() < 0.4
        reservation = Reservation(
            request_id=name,
            owner="me",
            new_tokens=length,
            max_tokens=30,
            session_id=session if on_session else None,
        )
        if isinstance(await run.engine.reserve(reservation), Refused):
            return
        cancelling = asyncio.create_task(cancel_later(name, chance.choice((chance.random() * 0.3, None))))
        job = GenerateJob(request_id=name, sampling=Sampling(max_tokens=30, ignore_eos=True), keep_tokens=0)
        if on_session:
            job = replace(job, extend_ids=packed(ids_of(length)))
        else:
            cancelling_feeder = asyncio.create_task(feed(name, length))
        answer = await run.collect(job)
        ended[name].set()
        endings.append(answer.finish.reason)
        await cancelling
        if not on_session:
            await cancelling_feeder

    async def feed(name: str, length: int) -> None:
        for piece in run.pieces(name, prompts[length], chunk=16):
            await run.engine.announce(piece)
            await asyncio.sleep(chance.random() * 0.002)
        await run.engine.first_logits(FirstLogits(request_id=name, logits=prompts[length].logits))

    async def cancel_later(name: str, delay: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended[name].wait(), delay)
        await run.engine.cancel(name)
        await run.engine.cancel(name)

    await asyncio.gather(*(life(f"r{i}") for i in range(60)))
    assert endings.count(FinishReason.CANCELLED) > 10
    assert endings.count(FinishReason.LENGTH) > 5
    assert run.used == 4, "the session alone"
    again = await run.ask("again", ids_of(50), SHORT)
    assert len(again.tokens) == 8
