"""Answers of a real service: equal to transformers', needles found, sessions, sparse decode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from tokenizers import Tokenizer

from deltafront.protos.v1 import deltafront_pb2 as pb

from .conftest import Haystack, Sizes, Table
from .reference import merged_model
from .wire import Answer, Wire, method, packed, text

GREEDY = pb.SamplingOptions(temperature=0, max_tokens=64, ignore_eos=True)


def ask(wire: Wire, session: str, question: str, selection: pb.PageSelection, tokens: int = 48) -> Answer:
    sampling = pb.SamplingOptions(max_tokens=tokens, stop=["."])
    return wire.generate(
        pb.GenerateRequest(
            session_id=session, append=text(question), sampling=sampling, page_selection=selection
        )
    )


def test_greedy_tokens_equal_transformers(
    wire: Wire, model_directory: Path, haystack: Haystack, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(haystack.text).ids[:320]
    model = merged_model(model_directory)
    with torch.inference_mode():
        expected = model.generate(torch.tensor([ids]), max_new_tokens=64, min_new_tokens=64, do_sample=False)
    got = wire.generate(
        pb.GenerateRequest(
            prompt=pb.Prompt(token_ids=packed(ids)),
            attention=method("dense"),
            sampling=GREEDY,
            page_selection=pb.PAGE_SELECTION_FULL,
        )
    )
    assert got.token_ids == expected[0, len(ids) :].tolist()
    assert got.finish.reason == pb.FINISH_REASON_LENGTH
    assert got.text == tokenizer.decode(got.token_ids)


@contextlib.contextmanager
def releasing(wire: Wire, session: str) -> Iterator[None]:
    """Release a session at the end of the `with` block, even if a check fails."""
    try:
        yield
    finally:
        wire.stub.ReleaseSession(pb.ReleaseSessionRequest(session_id=session))


@pytest.mark.parametrize("name", ["dense", "dpxa"])
def test_needles_are_found_and_delta_decodes_like_full(
    name: str, wire: Wire, haystack: Haystack, sizes: Sizes, table: Table
) -> None:
    # Without these options, dpxa would use dense attention or keep all tiles of the small run's document.
    options = {} if name == "dense" else {"min_tokens": 0, "window": min(256, sizes.document // 8)}
    result = wire.prefill(
        pb.PrefillRequest(prompt=text(haystack.text), attention=method(name, **options)), timeout=600
    )
    session = result.session.session_id
    right = same = 0
    answers, shares = [], []
    with releasing(wire, session):
        for needle in haystack.needles[: sizes.questions]:
            full = ask(wire, session, needle.question, pb.PAGE_SELECTION_FULL)
            delta = ask(wire, session, needle.question, pb.PAGE_SELECTION_DELTA)
            right += needle.answered_by(full.text)
            same += full.token_ids == delta.token_ids
            shares.append(delta.finish.page_share)
            answers.append((needle.value, full.text, delta.text))
    wanted = round(0.9 * sizes.questions)
    table.add(f"{name}: exact answers of {sizes.questions} at {haystack.tokens} tokens", right)
    table.add(f"{name}: answers equal under delta and full decode", same)
    table.add(f"{name}: mean attention density", round(result.density.mean, 4))
    table.add(f"{name}: pages attended / held, mean", round(sum(shares) / len(shares), 4))
    assert right >= wanted, answers
    assert same >= wanted, answers
    assert result.usage.prompt_tokens == haystack.tokens
    if name == "dense":
        assert result.density.mean == 1.0
    else:
        assert 0.0 < result.density.mean < 0.95


def test_recomputing_all_blocks_answers_as_a_dense_prefill(wire: Wire, middling: Haystack) -> None:
    def answer(name: str, blocks: int, **options: float) -> Answer:
        return wire.generate(
            pb.GenerateRequest(
                prompt=text(middling.text),
                append=text(middling.needles[0].question),
                attention=method(name, **options),
                sampling=pb.SamplingOptions(max_tokens=40, ignore_eos=True),
                page_selection=pb.PAGE_SELECTION_FULL,
                recompute_blocks=blocks,
            ),
            timeout=600,
        )

    sparsely = {"min_tokens": 0, "sink": 128, "window": 128}
    dense, plain = answer("dense", 64), answer("streaming", 0, **sparsely)
    again = answer("streaming", 64, **sparsely)
    assert middling.needles[0].answered_by(dense.text)
    assert plain.token_ids != dense.token_ids
    assert again.token_ids == dense.token_ids
    before_tail = (again.finish.usage.prompt_tokens - 128) // 128
    assert again.finish.recomputed_tokens == 128 * (before_tail - 1)
    assert {part.name: part.seconds for part in again.finish.timings.parts}["recompute"] > 0
    assert dense.finish.recomputed_tokens == plain.finish.recomputed_tokens == 0


def test_second_question_prefills_no_document_token(
    wire: Wire, haystack: Haystack, sizes: Sizes, table: Table
) -> None:
    needle, other = haystack.needles[:2]
    request = pb.GenerateRequest(
        prompt=text(haystack.text),
        append=text(needle.question),
        attention=method("dense"),
        sampling=pb.SamplingOptions(max_tokens=48, stop=["."]),
        page_selection=pb.PAGE_SELECTION_FULL,
    )
    request.session_ttl.FromSeconds(300)
    first = wire.generate(request)
    session = first.finish.session
    with releasing(wire, session.session_id):
        second = ask(wire, session.session_id, other.question, pb.PAGE_SELECTION_FULL)
        again = ask(wire, session.session_id, needle.question, pb.PAGE_SELECTION_FULL)
    share = second.finish.timings.ttft_seconds / first.finish.timings.ttft_seconds
    table.add("second question's TTFT over the first's", round(share, 4))
    assert share < 0.2 or not sizes.timed
    assert session.tokens == haystack.tokens
    assert second.finish.usage.cached_tokens == haystack.tokens
    assert first.finish.usage.cached_tokens == 0
    assert not second.progress or max(second.progress) <= 256
    assert other.answered_by(second.text)
    assert again.text.split() == first.text.split()
    assert first.progress == sorted(first.progress)
    assert first.progress[-1] >= haystack.tokens


def test_seeded_sampling_is_reproducible_and_ends_at_stop_strings(wire: Wire) -> None:
    def run(seed: int) -> Answer:
        sampling = pb.SamplingOptions(temperature=0.9, top_p=0.95, seed=seed, max_tokens=40, ignore_eos=True)
        return wire.generate(pb.GenerateRequest(prompt=text("The whale rose and"), sampling=sampling))

    first, again, other = run(3), run(3), run(4)
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids
    stop = first.text[len(first.text) // 2 :][:4]
    sampling = pb.SamplingOptions(
        temperature=0.9, top_p=0.95, seed=3, max_tokens=40, ignore_eos=True, stop=[stop]
    )
    stopped = wire.generate(pb.GenerateRequest(prompt=text("The whale rose and"), sampling=sampling))
    assert stopped.finish.reason == pb.FINISH_REASON_STOP_STRING
    assert stopped.text == first.text[: first.text.index(stop)]


def test_chat_messages_use_the_template(wire: Wire) -> None:
    messages_ = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Say hello.")])
    answer = wire.generate(
        pb.GenerateRequest(prompt=pb.Prompt(messages=messages_), sampling=pb.SamplingOptions(max_tokens=24))
    )
    assert answer.text.strip()
    assert "<|im_start|>" not in answer.text
    assert answer.finish.usage.prompt_tokens > 20


def test_openais_client_gets_the_same_answer(wire: Wire, http: str) -> None:
    said = "Name three animals that live in the sea."
    messages = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=said)])
    sampling = pb.SamplingOptions(max_tokens=24)
    ours = wire.generate(pb.GenerateRequest(prompt=pb.Prompt(messages=messages), sampling=sampling))
    with openai.OpenAI(base_url=f"{http}/v1", api_key="any", max_retries=0) as client:
        model = client.models.list().data[0].id
        chunks = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": said}], max_completion_tokens=24, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ours.text
