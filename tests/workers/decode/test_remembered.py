"""Tests a decode worker's prefix cache: prompts that extend cached ones get the same answers as after a full
prefill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from deltafront.kernels.methods import method_spec
from deltafront.workers.messages.events import FinishReason, Prefix
from deltafront.workers.messages.requests import GenerateJob, KeepSession, RefusalReason, Refused, Reservation

from ..conftest import Answer, Bench
from ..keys import key_of
from ..prompts import packed
from .test_decode_engine import GREEDY, NEW, expected, prompt

__all__ = ["expected"]
DOCUMENT = prompt(150)
Expected = Callable[[list[int]], list[int]]


async def read(run: Bench, name: str, ids: Sequence[int], **more: Any) -> Answer:
    """Run a prompt that a prefill group prefills, with its prefix-cache key."""
    key = key_of(ids, **{part: more.pop(part) for part in ("remembers", "retain_s", "owner") if part in more})
    await run.reserve(name, len(ids), NEW, key=key, **more)
    await run.deliver(name, list(ids))
    return await run.collect(
        GenerateJob(request_id=name, sampling=GREEDY, keep_tokens=more.get("keep_tokens", 0))
    )


async def found(run: Bench, ids: Sequence[int], **more: Any) -> int:
    prefix = await run.engine.find_prefix(key_of(ids, **more))
    return prefix.tokens if prefix else 0


async def go_on(run: Bench, name: str, ids: Sequence[int], held: int, **more: Any) -> Answer:
    """Run a prompt whose first tokens are cached."""
    given = {"key": key_of(ids), "prefix_tokens": held, "reads_rest": True, **more}
    reserved = await run.reserve(name, len(ids) - held, NEW, **given)
    assert reserved.held_tokens == held
    job = GenerateJob(
        request_id=name,
        sampling=GREEDY,
        extend_ids=packed(ids[held:]),
        keep_tokens=more.get("keep_tokens", 0),
    )
    return await run.collect(job)


@pytest.mark.parametrize("length", sorted({16 * page + by for page in range(8, 11) for by in (-1, 0, 1)}))
async def test_cached_prefix_gives_the_same_answer_at_every_page_boundary(
    bench: Any, expected: Expected, length: int
) -> None:
    run = await bench()
    ids = prompt(length)
    first = await read(run, "first", ids)
    assert first.ids == expected(ids)
    assert (run.used, await found(run, ids)) == (0, length // 16 * 16)
    again = await go_on(run, "again", ids, (length - 1) // 16 * 16)
    assert again.ids == first.ids
    for held in (16, (length - 17) // 16 * 16):
        assert (await go_on(run, f"from {held}", ids, held)).ids == first.ids


async def test_prefix_cache_keeps_the_answer_with_its_prompt(bench: Any, expected: Expected) -> None:
    """A conversation reuses it turn by turn."""
    run, ids = await bench(), list(DOCUMENT)
    answer = await read(run, "turn 0", ids)
    for turn in range(1, 4):
        ids += [*answer.ids, *prompt(20, seed=turn)]
        held = await found(run, ids)
        assert held == (len(ids) - 20 - 1) // 16 * 16, "all but the last token, whose K/V nobody made"
        answer = await go_on(run, f"turn {turn}", ids, held)
        assert answer.ids == expected(ids)


async def test_another_question_reuses_the_documents_prefix(bench: Any, expected: Expected) -> None:
    run = await bench()
    await read(run, "first", [*DOCUMENT, 3, 4, 5])
    for number in range(3):
        ids = [*DOCUMENT, *prompt(30, seed=number + 40)]
        held = await found(run, ids)
        assert held == 144
        assert (await go_on(run, f"asked {number}", ids, held)).ids == expected(ids)
    assert run.used == 0


async def test_two_requests_at_once_share_cached_pages(bench: Any, expected: Expected) -> None:
    run = await bench(cache_tokens=(150 // 16 + 2 * 6) * 16)
    await read(run, "first", DOCUMENT)
    prompts = [[*DOCUMENT, *prompt(20, seed=seed)] for seed in (1, 2)]
    answers = await asyncio.gather(*(go_on(run, f"q{n}", ids, 144) for n, ids in enumerate(prompts)))
    assert [answer.ids for answer in answers] == [expected(ids) for ids in prompts]


async def test_group_prefills_the_rest_after_a_cached_prefix(bench: Any, expected: Expected) -> None:
    """The group writes to no page of the prefix."""
    run = await bench()
    await read(run, "first", DOCUMENT)
    ids, name = [*DOCUMENT, *prompt(80, seed=3)], "longer"
    await run.reserve(name, len(ids) - 128, NEW, key=key_of(ids), prefix_tokens=128)
    whole = run.prefill(ids)
    early, late = [], []
    for piece in run.pieces(name, whole):
        (early if piece.start < 128 else late).append(piece)
    assert await run.engine.resume(name, [], 0) == 128, "a lost group takes no prefix with it"
    await asyncio.gather(*(run.engine.announce(piece) for piece in late))
    await run.deliver_logits(name, whole)
    answer = await run.collect(GenerateJob(request_id=name, sampling=GREEDY))
    assert answer.ids == expected(ids)
    assert await found(run, ids) == len(ids) // 16 * 16
    await run.reserve("wrong", len(ids) - 128, NEW, key=key_of(ids), prefix_tokens=128)
    with pytest.raises(ValueError, match="overlaps"):
        await run.engine.announce(run.pieces("wrong", whole, chunk=64)[0])
    await run.engine.cancel("wrong")
    again = await go_on(run, "again", DOCUMENT, 128)
    assert again.ids == expected(list(DOCUMENT))


async def test_session_holds_cached_pages_and_leaves_them_cached(bench: Any, expected: Expected) -> None:
    run = await bench(cache_tokens=24 * 16)
    kept = (await read(run, "kept", DOCUMENT, keep_tokens=150)).first.session.session_id
    await run.engine.renew(["kept"])
    assert run.used == 10
    big = await run.engine.reserve(Reservation(request_id="big", owner="you", new_tokens=160, max_tokens=96))
    assert isinstance(big, Refused) and (big.reason, big.free) == (RefusalReason.PAGES, 14)
    answer = await go_on(run, "asked", [*DOCUMENT, 7], 144, keep_tokens=151)
    assert answer.ids == expected([*DOCUMENT, 7])
    for session in (kept, answer.first.session.session_id):
        assert await run.engine.release_session(session, "me")
    assert (run.used, await found(run, DOCUMENT)) == (0, 144)
    await run.reserve("big", 160, 96)
    assert await found(run, DOCUMENT) == 128, "its end made room"
    await run.engine.cancel("big")


async def test_cached_pages_count_as_free_and_are_evicted_on_demand(bench: Any) -> None:
    """Old prompts never cause a refusal: not at admission, nor by API servers, nor for waiting
    reservations."""
    run = await bench(cache_tokens=16 * 16)
    await read(run, "first", DOCUMENT)
    stats = await run.engine.stats()
    assert (stats.pages_free, stats.pages_total) == (16, 16)
    assert (stats.pages_remembered, stats.pages_evicted) == (11, 0)
    await run.reserve("all", 200, 56, wait=False)
    stats = await run.engine.stats()
    assert (stats.pages_free, stats.pages_remembered, stats.pages_evicted) == (0, 0, 11)
    waiting = asyncio.create_task(run.reserve("next", 200, 56, wait=True))
    await asyncio.sleep(0.02)
    await run.engine.cancel("all")
    assert (await waiting).pages == 16
    await run.engine.cancel("next")


async def test_cancelled_requests_leave_cached_blocks_and_failed_ones_none(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await bench()
    await run.reserve("unread", len(DOCUMENT), NEW, key=key_of(DOCUMENT))
    await run.engine.cancel("unread")
    assert await found(run, DOCUMENT) == 0
    await run.reserve("left", len(DOCUMENT), NEW, key=key_of(DOCUMENT))
    await run.deliver("left", DOCUMENT)
    stream = run.engine.generate(GenerateJob(request_id="left", sampling=GREEDY))
    for _ in range(3):
        await anext(stream)
    await stream.aclose()
    await run.engine.cancel("left")
    while run.used:  # the running step still uses them
        await asyncio.sleep(0.01)
    assert await found(run, DOCUMENT) == 144
    other = prompt(100, seed=9)

    def broken(*_arguments: object) -> None:
        raise RuntimeError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(run.engine._runner, "launch", broken)
        answer = await read(run, "failed", other)
    assert answer.finish.reason is FinishReason.FAILED and len(answer.ids) == 1
    assert (run.used, await found(run, other)) == (0, 0)


async def test_answers_with_page_selection_are_not_cached(bench: Any) -> None:
    """Their KV is approximate. The prompt's KV stays cached."""
    run = await bench(page_selection="delta", delta_layers=(2,), page_budget=4, recency=2)
    answer = await read(run, "first", DOCUMENT)
    assert await found(run, [*DOCUMENT, *answer.ids]) == 144


async def test_sparse_prompt_is_cached_up_to_its_last_whole_block(bench: Any) -> None:
    """KV of the last, partial block depends on the prompt's end. No later block, nor the answer, is found."""
    run, method = await bench(), method_spec("dpxa", {"min_tokens": 0})
    ids = prompt(300)
    await run.reserve("first", len(ids), NEW, key=key_of(ids, method=method))
    await run.deliver("first", ids)
    answer = await run.collect(GenerateJob(request_id="first", sampling=GREEDY))
    longer = [*ids, *answer.ids, *prompt(20)]
    key = key_of(longer, method=method)
    assert await run.engine.find_prefix(key) == Prefix(tokens=256, exact=False)
    # The decode worker prefills the rest densely, and then all of it is cached.
    await run.reserve("second", len(longer) - 256, NEW, key=key, prefix_tokens=256, reads_rest=True)
    job = GenerateJob(request_id="second", sampling=GREEDY, extend_ids=packed(longer[256:]))
    await run.collect(job)
    assert await run.engine.find_prefix(key) == Prefix(tokens=len(longer) // 16 * 16, exact=False)
    assert await run.engine.find_prefix(key_of(longer)) is None


async def test_prompt_kept_as_a_session_is_cached_too(bench: Any) -> None:
    run = await bench()
    await run.reserve("kept", len(DOCUMENT), 0, keep_ttl_s=30.0, key=key_of(DOCUMENT))
    await run.deliver("kept", DOCUMENT)
    kept = await run.engine.keep(KeepSession(request_id="kept"))
    assert await found(run, DOCUMENT) == 144
    assert await run.engine.release_session(kept.session.session_id, "me")
    assert (run.used, await found(run, DOCUMENT)) == (0, 144)
