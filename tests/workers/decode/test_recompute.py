"""Tests blocks of a sparsely prefilled prompt that are recomputed before the first token, on a tiny
Llama. If all blocks are recomputed, answers equal those after dense prefill. Sessions and cached blocks
stay unchanged."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import torch

from deltafront.kernels.constants import BLOCK, PAGE_TOKENS
from deltafront.kernels.methods import method_spec
from deltafront.workers.kv.pages import page_manager
from deltafront.workers.messages.events import FinishReason, Prefix
from deltafront.workers.messages.requests import (
    GenerateJob,
    KeepSession,
    RequestOptions,
    Reservation,
    Sampling,
    recompute_pages,
)
from tests.workers.conftest import Answer, Bench, Prefilled

from ..keys import key_of
from ..prompts import packed

NEW = 12
GREEDY = Sampling(max_tokens=NEW, ignore_eos=True)
TOKENS = 5 * BLOCK
ALL = TOKENS // BLOCK - 1


def tokens(count: int, seed: int) -> list[int]:
    return [random.Random(f"{seed} {place}").randrange(198) for place in range(count)]


DOCUMENT = tokens(TOKENS, 1)
QUESTION = tokens(30, 2)


@torch.inference_mode()
def read_sparsely(bench: Bench, ids: list[int]) -> Prefilled:
    """Prefill with attention only inside each 128-token block, so that only block 0 is exact."""
    kv: list[tuple[np.ndarray, np.ndarray]] = []
    place_T = torch.arange(len(ids))
    block_T = place_T // BLOCK
    seen_TS = (place_T[:, None] >= place_T) & (block_T[:, None] == block_T)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kv.append((k.numpy().copy(), v.numpy().copy()))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen_TS, enable_gqa=True)
        return out[0].transpose(0, 1)

    stack = bench.stack
    hidden_TC = stack.forward(stack.embed(torch.tensor(ids)), place_T, attend)
    return Prefilled(kv, stack.logits(hidden_TC[-1:])[0].numpy())


class Sparse:
    """A bench whose prompts are prefilled sparsely, and the answers after dense prefill."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._read = bench.prefill

    async def dense(self, ids: list[int]) -> list[int]:
        self.bench.prefill = self._read  # type: ignore[method-assign]
        name = f"dense {len(ids)} {ids[-1]}"
        return (await self.bench.ask(name, ids, GREEDY)).ids

    async def reserve_and_deliver(self, name: str, ids: list[int], blocks: int, **more: Any) -> None:
        self.bench.prefill = lambda ids: read_sparsely(self.bench, ids)  # type: ignore[method-assign]
        await self.bench.reserve(name, len(ids), NEW, recompute_blocks=blocks, **more)
        await self.bench.deliver(name, ids)

    async def ask(self, name: str, ids: list[int], blocks: int, keep_tokens: int = 0) -> Answer:
        await self.reserve_and_deliver(name, ids, blocks, keep_tokens=keep_tokens)
        job = GenerateJob(
            request_id=name,
            sampling=GREEDY,
            keep_tokens=keep_tokens,
            prompt_ids=packed(ids),
        )
        return await self.bench.collect(job)

    async def keep(self, ids: list[int], prompt_ids: bytes) -> str:
        await self.reserve_and_deliver("kept", ids, 0, keep_ttl_s=60.0)
        kept = await self.bench.engine.keep(KeepSession(request_id="kept", prompt_ids=prompt_ids))
        return str(kept.session.session_id)

    async def question(self, name: str, session: str, blocks: int, answered: tuple[int, ...] = ()) -> Answer:
        ids, left = [*QUESTION, *answered], NEW - len(answered)
        await self.bench.reserve(name, len(ids), left, session_id=session, recompute_blocks=blocks)
        job = GenerateJob(
            request_id=name,
            sampling=Sampling(max_tokens=left, ignore_eos=True),
            extend_ids=packed(ids),
            answered_tokens=len(answered),
        )
        return await self.bench.collect(job)


@pytest.fixture
async def sparse(bench: Any) -> Sparse:
    return Sparse(await bench())


@pytest.mark.parametrize("length", [TOKENS, TOKENS + 1, TOKENS + 127, TOKENS - 1])
async def test_recomputing_all_blocks_of_a_prompt_equals_dense_prefill(sparse: Sparse, length: int) -> None:
    prompt = tokens(length, 1)
    want = await sparse.dense(prompt)
    plain = await sparse.ask("plain", prompt, 0)
    again = await sparse.ask("again", prompt, 8)
    assert plain.ids != want, "the sparse reading should lose something"
    assert again.ids == want
    assert plain.finish.report.recomputed_tokens == plain.finish.report.recompute == 0
    tail = (length - 128) // BLOCK
    assert again.finish.report.recomputed_tokens == BLOCK * (tail - 1)
    assert again.finish.report.recompute > 0


async def test_blocks_are_recomputed_in_turns_with_others_decode_steps(bench: Any) -> None:
    sparse, prompt, calls = Sparse(await bench(append_chunk_tokens=96)), tokens(TOKENS, 1), list[Any]()
    want, runner = await sparse.dense(prompt), sparse.bench.engine._runner
    recompute, launch = runner.recompute, runner.launch

    def noting(*given: Any) -> Any:
        calls.append(given[-1])
        return recompute(*given)

    def launching(*given: Any) -> Any:
        calls.append("step")
        return launch(*given)

    runner.recompute, runner.launch = noting, launching
    asking = sparse.bench.ask("other", tokens(20, 2), Sampling(max_tokens=400, ignore_eos=True))
    other = asyncio.create_task(asking)
    while "step" not in calls:
        await asyncio.sleep(0.001)
    assert (await sparse.ask("again", prompt, 8)).ids == want
    assert not other.done() and len((await other).ids) == 400
    parts = [call.layers for call in calls if call != "step"]
    assert [layer for part in parts for layer in part] == list(range(runner.stack.layers.stop))
    first = next(place for place, call in enumerate(calls) if call != "step")
    assert len(parts) > 1 and calls[first + 1 : first + 2 * len(parts) : 2] == ["step"] * len(parts)


async def test_recomputing_all_blocks_leaves_the_session_unchanged(
    sparse: Sparse,
) -> None:
    want = await sparse.dense(DOCUMENT + QUESTION)
    session = await sparse.keep(DOCUMENT, packed(DOCUMENT))
    held = sparse.bench.used
    before = await sparse.question("before", session, 0)
    assert before.ids != want
    both = await asyncio.gather(*(sparse.question(f"again{i}", session, 8) for i in range(2)))
    assert [answer.ids for answer in both] == [want, want]
    assert both[0].finish.report.recomputed_tokens == BLOCK * ALL
    after = await sparse.question("after", session, 0)
    assert after.ids == before.ids
    assert sparse.bench.used == held
    assert await sparse.bench.engine.release_session(session, "me")
    assert sparse.bench.used == 0


@pytest.mark.parametrize("length", [TOKENS, TOKENS - 5])
async def test_session_kept_with_an_answer_holds_kv_before_recomputation(sparse: Sparse, length: int) -> None:
    """The session keeps the sparse KV, so that the next question can choose other blocks to recompute."""
    part = DOCUMENT[:length]
    reference = await sparse.question("reference", await sparse.keep(part, packed(part)), 0)
    answer = await sparse.ask("answered", DOCUMENT, 8, keep_tokens=length)
    assert answer.ids == await sparse.dense(DOCUMENT)
    session = answer.first.session.session_id
    assert (await sparse.question("as read", session, 0)).ids == reference.ids
    again = await sparse.question("again", session, 8)
    assert again.finish.report.recomputed_tokens == BLOCK * (length // BLOCK - 1)
    if length == TOKENS:
        assert again.ids == await sparse.dense(DOCUMENT + QUESTION)


@pytest.mark.parametrize("blocks", [0, 1])
async def test_kv_kept_after_a_prefix_does_not_depend_on_the_question(sparse: Sparse, blocks: int) -> None:
    """A prompt extends a cached prefix, is kept as a session, and has a question appended."""
    run, kept, method = sparse.bench, len(DOCUMENT) + 64, method_spec("streaming", {"min_tokens": 0})
    await sparse.reserve_and_deliver("read", DOCUMENT, 0, key=key_of(DOCUMENT, method=method))
    await run.collect(GenerateJob(request_id="read", sampling=GREEDY))
    keys_and_values = []
    for number in range(3):
        name, ids = f"asked{number}", [*tokens(64, 9), *tokens(20, 50 + number)]
        key = key_of([*DOCUMENT, *ids], method=method)
        found = await run.engine.find_prefix(key)
        held = kept if number and not blocks else len(DOCUMENT)
        assert found == Prefix(tokens=held, exact=False), "what follows recomputed blocks is not remembered"
        more = {
            "prefix_tokens": len(DOCUMENT),
            "reads_rest": True,
            "key": key,
            "keep_tokens": kept,
            "keep_ttl_s": 60.0,
        }
        await run.reserve(name, len(ids), NEW, recompute_blocks=blocks, **more)
        job = GenerateJob(
            request_id=name,
            sampling=GREEDY,
            extend_ids=packed(ids),
            prompt_ids=packed(DOCUMENT) if blocks else b"",
            keep_tokens=kept,
        )
        answer = await run.collect(job)
        assert answer.finish.report.recomputed_tokens == BLOCK * blocks
        session = run.engine._manager.leases._leases[answer.first.session.session_id]
        cache = run.engine._runner.cache
        sides = [
            cache.read(layer, session.pages, len(DOCUMENT), kept - len(DOCUMENT)) for layer in cache.layers
        ]
        keys_and_values.append([side.clone() for pair in sides for side in pair])
        await run.engine.release_session(answer.first.session.session_id, "me")
    for other in keys_and_values[1:]:
        assert all(torch.equal(one, two) for one, two in zip(keys_and_values[0], other, strict=True))


async def test_recomputes_the_blocks_with_the_most_attention_first(sparse: Sparse) -> None:
    session = await sparse.keep(DOCUMENT, packed(DOCUMENT))
    seen: list[tuple[int, ...]] = []
    runner = sparse.bench.engine._runner
    plain = runner.recompute

    def noting(pages: Any, blocks: Any, ids: Any, *more: Any) -> Any:
        assert list(ids) == [DOCUMENT[b * BLOCK + place] for b in blocks for place in range(BLOCK)]
        seen.append(tuple(blocks))
        return plain(pages, blocks, ids, *more)

    runner.recompute = noting
    answers = [await sparse.question(f"q{count}", session, count) for count in (1, 2, 3)]
    assert [len(blocks) for blocks in seen] == [1, 2, 3]
    assert set(seen[0]) < set(seen[1]) < set(seen[2])
    assert [one.finish.report.recomputed_tokens for one in answers] == [BLOCK, 2 * BLOCK, 3 * BLOCK]


@pytest.mark.parametrize("length", [1, 100, 128, 255, 256, 257, 383, 384])
async def test_prompt_too_short_for_recomputation_is_answered(sparse: Sparse, length: int) -> None:
    """If the prompt is longer than its tail, the tail is prefilled densely."""
    prompt = tokens(length, 6)
    answer = await sparse.ask("short", prompt, 8)
    assert answer.finish.reason is FinishReason.LENGTH
    assert answer.finish.report.recomputed_tokens == BLOCK * max(0, (length - 128) // BLOCK - 1)
    if length >= 2 * BLOCK:
        assert answer.ids == await sparse.dense(prompt)
    session = await sparse.keep(prompt, packed(prompt))
    asked = await sparse.question("question", session, 8)
    assert asked.finish.report.recomputed_tokens == BLOCK * max(0, length // BLOCK - 1)
    assert not sparse.bench.engine.fault


async def test_missing_pages_fail_only_their_request(sparse: Sparse, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(page_manager, "recompute_pages", lambda *_, **__: 3)
        answer = await sparse.ask("missing", DOCUMENT, 8)
    assert answer.finish.reason is FinishReason.FAILED
    assert "places of the table, but 3 own pages" in answer.finish.message
    assert (await sparse.ask("next", DOCUMENT, 8)).ids == await sparse.dense(DOCUMENT)


async def test_recomputes_no_block_of_a_long_appended_question(
    sparse: Sparse,
) -> None:
    """The question was prefilled densely, and no pages are reserved to recompute it."""
    session = await sparse.keep(DOCUMENT[:300], packed(DOCUMENT[:300]))
    ids = tokens(400, 5)
    await sparse.bench.reserve("long", len(ids), NEW, session_id=session, recompute_blocks=8)
    job = GenerateJob(request_id="long", sampling=GREEDY, extend_ids=packed(ids))
    answer = await sparse.bench.collect(job)
    assert answer.finish.reason is FinishReason.LENGTH
    assert answer.finish.report.recomputed_tokens == BLOCK


async def test_answer_resumed_after_a_death_has_the_same_tokens(sparse: Sparse) -> None:
    """Tokens of the answer do not count as the question, so the same blocks are recomputed."""
    session = await sparse.keep(DOCUMENT, packed(DOCUMENT))
    whole = await sparse.question("whole", session, 2)
    rest = await sparse.question("rest", session, 2, answered=tuple(whole.ids[:7]))
    assert rest.ids == whole.ids[7:]
    prompt = await sparse.ask("prompt", DOCUMENT, 2)
    await sparse.reserve_and_deliver("resumed", DOCUMENT, 2, resume_tokens=5)
    job = GenerateJob(
        request_id="resumed",
        sampling=Sampling(max_tokens=NEW - 5, ignore_eos=True),
        extend_ids=packed(prompt.ids[:5]),
        prompt_ids=packed(DOCUMENT),
        answered_tokens=5,
    )
    assert (await sparse.bench.collect(job)).ids == prompt.ids[5:]


async def test_session_of_a_dense_prefill_recomputes_nothing(
    sparse: Sparse,
) -> None:
    session = await sparse.keep(DOCUMENT, b"")
    held = sparse.bench.used
    before = await sparse.question("before", session, 0)
    reservation = Reservation(
        request_id="asked",
        owner="me",
        new_tokens=len(QUESTION),
        max_tokens=NEW,
        session_id=session,
        options=RequestOptions(recompute_blocks=8),
    )
    reserved = await sparse.bench.engine.reserve(reservation)
    assert reserved.pages == (TOKENS + len(QUESTION) + NEW + PAGE_TOKENS - 1) // PAGE_TOKENS
    await sparse.bench.engine.cancel("asked")
    answer = await sparse.question("asked again", session, 8)
    assert answer.ids == before.ids
    assert answer.finish.report.recomputed_tokens == 0
    assert sparse.bench.used == held


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"prompt_ids": packed(DOCUMENT[1:])}, "the ids of 639 tokens came with a prompt of 640"),
        ({"prompt_ids": packed([999] * TOKENS)}, "token id 999 is outside the vocabulary of 199"),
        ({"answered_tokens": 1}, "answered_tokens 1 is not within 0 appended tokens"),
    ],
)
async def test_impossible_recomputation_fails_with_the_reason(
    sparse: Sparse, wrong: dict[str, Any], why: str
) -> None:
    await sparse.reserve_and_deliver("wrong", DOCUMENT, 2)
    given = {"prompt_ids": packed(DOCUMENT), **wrong}
    answer = await sparse.bench.collect(GenerateJob(request_id="wrong", sampling=GREEDY, **given))
    assert answer.finish.reason is FinishReason.FAILED
    assert why in answer.finish.message


@pytest.mark.parametrize(
    ("blocks", "of", "appended", "pages"),
    [
        (0, 9999, False, 0),
        (4, 128, False, 0),
        (4, 255, True, 0),
        (4, 256, True, 8),
        (4, 700, True, 32),
        (9, 700, True, 32),
        (1, 700, False, 8 + 16),
    ],
)
def test_reservation_counts_pages_for_recomputation(blocks: int, of: int, appended: bool, pages: int) -> None:
    assert recompute_pages(blocks, of, appended=appended) == pages
