"""Several answers of one request: n, best_of, and several prompts of a completion."""

from __future__ import annotations

from collections import Counter
from typing import Any

import openai
import pytest

from deltafront.service.door.edges.answering import OneAnswer
from deltafront.service.door.edges.edge import ReplyContext
from deltafront.service.door.edges.parts import AnswerSplitter
from deltafront.service.door.openai.answers import TEXT, Reply
from deltafront.service.door.openai.choices import Choices
from deltafront.service.door.openai.requests import StreamOptions
from deltafront.service.request.answers import ChoiceEvent, Density, GenerateFinished, Timings
from deltafront.service.request.text.token_bytes import TokenBytes
from deltafront.workers.messages.events import FinishReason, Token, Usage

from ..inprocess import HANG_S, House, wait_until
from ..test_requests import expected, ids, nothing_left
from .openai_calls import LONG, chat, complete


def test_choices_share_one_prefill_and_its_pages(house: House, api: openai.OpenAI) -> None:
    answer = complete(api, LONG, n=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {expected(ids(LONG), 5)}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (501, 20)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.deltafront["session"] is None
    assert len(house.group.jobs) == 1
    assert [r.new_tokens for r in house.decode.reservations if r.session_id] == [1, 1, 1]
    nothing_left(house)
    assert not house.decode._sessions


@pytest.mark.parametrize("ask", [chat, complete])
def test_streamed_choices_end_once_each_with_one_usage(house: House, api: openai.OpenAI, ask: Any) -> None:
    whole = ask(api, n=3)
    ends, usages, found = Counter[int](), [], ["", "", ""]
    for chunk in ask(api, n=3, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            said = choice.text if ask is complete else choice.delta.content
            found[choice.index] += said or ""
            ends[choice.index] += choice.finish_reason is not None
        usages += [chunk.usage] if chunk.usage else []
    assert ends == {0: 1, 1: 1, 2: 1}
    assert found == [c.text if ask is complete else c.message.content for c in whole.choices]
    assert [usage.completion_tokens for usage in usages] == [15] == [whole.usage.completion_tokens]
    assert usages[0].prompt_tokens == whole.usage.prompt_tokens
    nothing_left(house)


@pytest.mark.parametrize("prompts", [["one", "two more"], [list(b"one"), list(b"two more")]])
def test_several_prompts_are_answered_in_order(house: House, api: openai.OpenAI, prompts: Any) -> None:
    bos = isinstance(prompts[0], str)
    answer = complete(api, prompts, n=2)
    wanted = [expected(ids(text, bos), 5) for text in ("one", "one", "two more", "two more")]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11 + 2 * bos, 20)
    nothing_left(house)


def test_several_choices_can_continue_one_session(house: House, api: openai.OpenAI) -> None:
    made = complete(api, "document", extra_body={"session_ttl_s": 60}).deltafront["session"]
    answer = complete(api, "why?", n=2, extra_body={"session_id": made["session_id"]})
    text = expected(ids("document") + ids("why?"), 5)
    bare = expected(ids("document") + ids("why?", bos=False), 5)
    assert {choice.text for choice in answer.choices} <= {text, bare} and len(answer.choices) == 2
    assert made["session_id"] in house.decode._sessions


def test_each_choice_has_a_seed_of_its_own(house: House, api: openai.OpenAI) -> None:
    for _ in range(2):
        complete(api, n=3, temperature=1.0, seed=7)
    seeds = [job.sampling.seed for job in house.decode.jobs]
    assert seeds[0] == 7 and len(set(seeds)) == 3 and sorted(seeds[:3]) == sorted(seeds[3:])


def test_choice_resumes_after_its_decode_worker_fails(house: House, api: openai.OpenAI) -> None:
    house.decode.fail_after = [99, 2]
    answer = complete(api, LONG, n=2)
    assert {choice.text for choice in answer.choices} == {expected(ids(LONG), 5)}
    nothing_left(house)


def test_failed_choice_ends_the_stream_with_one_error(house: House, api: openai.OpenAI) -> None:
    house.decode.fail_after = [99, *[1] * 40]
    with pytest.raises(openai.APIError, match="gave up after"):
        list(complete(api, LONG, n=3, max_tokens=50, stream=True))
    nothing_left(house)


def test_client_that_leaves_ends_every_choice(house: House, api: openai.OpenAI) -> None:
    house.decode.pause_at = 2
    stream = complete(api, [LONG, "other"], n=2, stream=True)
    next(stream)
    assert house.decode.paused.wait(HANG_S)
    stream.close()
    nothing_left(house)
    wait_until(lambda: not house.decode._sessions, "a session is left")
    wait_until(lambda: not house.door._requests._resources.callers._accepted, "a use is left")


def test_bad_prompt_among_several_is_refused_first(house: House, api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(api, [[1, 2], [3, 999]])
    assert refused.value.param == "prompt"
    assert not house.group.jobs


def finished(tokens: int) -> GenerateFinished:
    usage, timings = Usage(prompt_tokens=3, completion_tokens=tokens), Timings(0, {}, [], 0)
    return GenerateFinished(FinishReason.LENGTH, "", usage, timings, Density(), None, 1.0, "id")


def test_best_of_returns_the_answers_with_the_highest_logprob() -> None:
    splitter = AnswerSplitter()
    context = ReplyContext("m", 99, "id", splitter, lambda: TokenBytes(None, {}))  # type: ignore[arg-type]
    replies = [Reply(TEXT, context, StreamOptions()) for _ in range(4)]
    answers = Choices([OneAnswer(reply, splitter) for reply in replies], replies, 2, 4, False)
    for index, logprobs in enumerate([[-2.0], [-0.5, -0.7], [-3.0], [-0.1, -0.2]]):
        for place, logprob in enumerate(logprobs):
            token = Token(index=place, token_id=1, logprob=logprob, text=str(index))
            answers.take(ChoiceEvent(index, index, token))
        answers.take(ChoiceEvent(index, index, finished(len(logprobs))))
    whole = answers.whole()
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "33"), (1, "11")]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (3, 6)


def test_best_of_counts_every_answer_in_usage(house: House, api: openai.OpenAI) -> None:
    answer = complete(api, best_of=3)
    assert len(answer.choices) == 1 and answer.usage.completion_tokens == 15
