"""Compares the decode engine's answers on a tiny random Llama with transformers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deltafront.workers.messages.events import FinishReason, SessionKept
from deltafront.workers.messages.requests import GenerateJob, KeepSession, Sampling
from deltafront.workers.messages.stages import FirstLogits

from ..prompts import Clock
from ..tiny_model import greedy

NEW = 40
"""More than two pages of 16 tokens, so that a prompt of 33 tokens exceeds a budget of four pages."""
GREEDY = Sampling(max_tokens=NEW, ignore_eos=True)
PROMPTS = (5, 16, 33, 150)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + length).randrange(198) for _ in range(length)]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> Callable[[list[int]], list[int]]:
    return greedy(tiny_llama, NEW)


async def test_greedy_tokens_equal_transformers_with_and_without_batching(
    bench: Any, expected: Callable[[list[int]], list[int]]
) -> None:
    run = await bench()
    prompts = [prompt(length) for length in PROMPTS]
    wanted = [expected(ids) for ids in prompts]
    assert len({tuple(ids) for ids in wanted}) == len(wanted), "the model should answer prompts differently"
    alone = [await run.ask(f"alone-{i}", ids, GREEDY) for i, ids in enumerate(prompts)]
    together = await asyncio.gather(*(run.ask(f"together-{i}", ids, GREEDY) for i, ids in enumerate(prompts)))
    assert [answer.ids for answer in alone] == wanted
    assert [answer.ids for answer in together] == wanted
    assert {answer.finish.reason for answer in alone} == {FinishReason.LENGTH}
    assert run.used == 0


async def test_requests_with_all_kv_count_as_decoding_without_a_batch_slot(bench: Any) -> None:
    """Requests whose KV has not arrived count as waiting."""
    run = await bench(max_batch=1)
    await run.reserve("unread", 16, 1)
    asked = [asyncio.create_task(run.ask(f"r{i}", prompt(16), GREEDY)) for i in range(3)]
    seen = set()
    while not all(task.done() for task in asked):
        stats = await run.engine.stats()
        assert stats.running <= stats.decoding < stats.running + stats.waiting, "one is never read"
        seen.add(stats.decoding - stats.running)
        await asyncio.sleep(0.002)
    assert max(seen) >= 1, "a batch of one"
    await run.engine.cancel("unread")


async def test_session_question_equals_full_prompt_and_keeps_the_session(
    bench: Any, expected: Callable[[list[int]], list[int]]
) -> None:
    run = await bench(wall=Clock())
    document = prompt(150)
    first = await run.ask("first", document, GREEDY, keep_tokens=150, keep_ttl_s=60.0)
    assert first.ids == expected(document)
    assert first.first.session.expires == 1060.0
    held = run.used
    assert held == 10
    questions = [prompt(length, seed=1) for length in (1, 3, 20, 130)]
    wanted = [expected(document + question) for question in questions]
    session = first.first.session.session_id
    answers = await asyncio.gather(
        *(run.ask_session(f"q{i}", session, question, GREEDY) for i, question in enumerate(questions))
    )
    assert [answer.ids for answer in answers] == wanted
    again = await run.ask_session("again", session, questions[2], GREEDY)
    assert again.ids == wanted[2]
    assert run.used == held
    assert await run.engine.release_session(session, "me")
    assert run.used == 0


async def test_keeps_sessions_on_a_session_and_on_part_of_a_prompt(
    bench: Any, expected: Callable[[list[int]], list[int]]
) -> None:
    run = await bench()
    document = prompt(100)
    part = (await run.ask("part", document, GREEDY, keep_tokens=70)).first.session.session_id
    more, question = prompt(25, seed=2), prompt(9, seed=3)
    await run.reserve("longer", len(more), NEW, session_id=part, keep_tokens=95)
    packed = torch.tensor(more, dtype=torch.int32).numpy().tobytes()
    longer = await run.collect(
        GenerateJob(request_id="longer", sampling=GREEDY, extend_ids=packed, keep_tokens=95)
    )
    assert longer.ids == expected(document[:70] + more)
    await run.engine.release_session(part, "me")
    answer = await run.ask_session("question", longer.first.session.session_id, question, GREEDY)
    assert answer.ids == expected(document[:70] + more + question)


async def test_prefill_without_an_answer_becomes_a_session(
    bench: Any, expected: Callable[[list[int]], list[int]]
) -> None:
    clock = Clock()
    run = await bench(clock=clock)
    document, question = prompt(75), prompt(10, seed=4)
    await run.reserve("read", 75, 0, keep_ttl_s=30.0)
    keeping = asyncio.create_task(run.engine.keep(KeepSession(request_id="read")))
    await asyncio.sleep(0.02)
    assert not keeping.done(), "no page is here yet"
    clock.now += 0.5
    await run.deliver("read", document)
    kept = await keeping
    assert isinstance(kept, SessionKept) and kept.session.tokens == 75
    assert kept.session.session_id.startswith("test.")
    assert kept.report.handoff_bytes == 75 * 6 * 2 * 2 * 16 * 4
    assert kept.report.handoff_exposed == pytest.approx(0.5)
    answer = await run.ask_session("question", kept.session.session_id, question, GREEDY)
    assert answer.ids == expected(document + question)


async def test_eos_stops_unless_ignored(bench: Any, expected: Callable[[list[int]], list[int]]) -> None:
    ids = prompt(33)
    greedy = expected(ids)
    end = greedy[7]
    run = await bench()
    run.engine._scheduler._eos_ids = frozenset({end})  # the tiny model never generates its own
    stopped = await run.ask("stop", ids, Sampling(max_tokens=NEW))
    assert stopped.ids == greedy[: greedy.index(end) + 1]
    assert stopped.finish.reason is FinishReason.STOP
    assert (await run.ask("on", ids, GREEDY)).ids == greedy


async def test_seeded_samples_do_not_depend_on_the_batch(bench: Any) -> None:
    run = await bench(max_batch=3)
    ids = prompt(33)
    samplings = [
        Sampling(temperature=1.0, max_tokens=20, seed=1, ignore_eos=True),
        Sampling(temperature=0.7, top_p=0.8, max_tokens=30, seed=1, ignore_eos=True),
        Sampling(temperature=1.3, top_k=20, max_tokens=25, seed=2, ignore_eos=True),
        Sampling(temperature=0.9, top_k=50, top_p=0.9, max_tokens=40, seed=3, ignore_eos=True),
        Sampling(max_tokens=15, ignore_eos=True),
    ]
    alone = [await run.ask(f"alone-{i}", ids, sampling) for i, sampling in enumerate(samplings)]
    together = await asyncio.gather(
        *(run.ask(f"together-{i}", ids, sampling) for i, sampling in enumerate(samplings))
    )
    assert [answer.ids for answer in alone] == [answer.ids for answer in together]
    assert len({tuple(answer.ids[:15]) for answer in alone}) == len(samplings)
    for one, other in zip(alone, together, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)


async def test_logprobs_ignore_temperature_top_k_and_top_p(bench: Any) -> None:
    run = await bench()
    ids = prompt(16)
    answer = await run.ask(
        "a", ids, Sampling(temperature=1.5, top_k=5, max_tokens=6, ignore_eos=True, seed=9)
    )
    for event in answer.tokens:
        logits = torch.from_numpy(run.prefill(ids).logits)
        assert event.logprob == pytest.approx(float(logits.log_softmax(-1)[event.token_id]), abs=1e-4)
        ids = [*ids, event.token_id]


async def test_page_selection_of_all_pages_equals_full_decode(
    bench: Any, expected: Callable[[list[int]], list[int]]
) -> None:
    run = await bench(
        page_selection="delta", full_layers=(0,), delta_layers=(2, 4), page_budget=64, recency=4
    )
    prompts = [prompt(length) for length in PROMPTS]
    answers = await asyncio.gather(*(run.ask(f"r{i}", ids, GREEDY) for i, ids in enumerate(prompts)))
    assert [answer.ids for answer in answers] == [expected(ids) for ids in prompts]
    for length, answer in zip(PROMPTS, answers, strict=True):
        report = answer.finish.report
        assert report.pages_attended == report.pages_held
        assert report.pages_held == 2 * sum(-(-(length + i) // 16) for i in range(1, NEW))


async def test_batch_mixes_page_selection_and_full_decode_requests(
    bench: Any, expected: Callable[[list[int]], list[int]]
) -> None:
    run = await bench(page_selection="delta", delta_layers=(2,), page_budget=4, recency=2)
    ids, other = prompt(150), prompt(33)
    alone = await run.ask("alone", ids, GREEDY)
    delta, full, small = await asyncio.gather(
        run.ask("delta", ids, GREEDY),
        run.ask("full", ids, GREEDY, page_selection="full"),
        run.ask("small", other, GREEDY, page_selection="delta"),
    )
    assert full.ids == expected(ids)
    assert delta.ids == alone.ids
    assert delta.finish.report.pages_attended == 3 * 4 * (NEW - 1)
    assert full.finish.report.pages_attended == full.finish.report.pages_held
    assert small.finish.report.pages_attended < small.finish.report.pages_held


async def test_latency_parts_add_up_to_the_time_to_first_token(bench: Any) -> None:
    clock = Clock()
    run = await bench(clock=clock, max_batch=1, append_chunk_tokens=48)
    runner = run.engine._runner
    runner.first_tokens = clock.during(0.03, runner.first_tokens)
    runner.append = clock.during(0.5, runner.append)
    made = run.prefill(prompt(150))
    pieces = run.pieces("late", made)
    await run.reserve("late", 150, 4, keep_tokens=150)
    for piece in pieces[:-1]:
        await run.engine.announce(piece)
    await run.engine.first_logits(FirstLogits(request_id="late", logits=made.logits))
    began = clock.now
    stream = run.engine.generate(
        GenerateJob(request_id="late", sampling=Sampling(max_tokens=4), keep_tokens=150)
    )
    getting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    clock.now += 0.2
    await run.engine.announce(pieces[-1])
    first = await getting
    assert first.report.handoff_exposed == pytest.approx(0.2)
    assert first.report.first_step == pytest.approx(0.03)
    assert parts(first.report) == pytest.approx(clock.now - began)
    session, packed = first.session.session_id, torch.tensor(prompt(100), dtype=torch.int32).numpy().tobytes()
    await run.reserve("more", 100, 4, session_id=session)
    began = clock.now
    more = run.engine.generate(
        GenerateJob(request_id="more", sampling=Sampling(max_tokens=4), extend_ids=packed)
    )
    getting = asyncio.ensure_future(anext(more))
    await asyncio.sleep(0)
    clock.now += 1.5  # with max_batch 1, it waits until the first stream ends
    assert [event async for event in stream][-1].reason is FinishReason.LENGTH
    report = (await getting).report
    assert report.decode_wait == pytest.approx(1.5) and report.handoff_exposed == 0
    assert report.append_prefill == pytest.approx(3 * 0.5), "48, 48 and 4 tokens"
    assert parts(report) == pytest.approx(clock.now - began)
    await more.aclose()


def parts(report: Any) -> float:
    return report.handoff_exposed + report.decode_wait + report.append_prefill + report.first_step
