"""A completion that echoes its prompt, with log-probabilities, as lm-eval asks for it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from ..inprocess import House
from ..test_requests import expected, ids, nothing_left
from .openai_calls import complete


def test_echo_puts_the_prompt_before_its_answer(house: House, api: openai.OpenAI) -> None:
    answer = complete(api, "hi there", echo=True)
    assert answer.choices[0].text == "hi there" + expected(ids("hi there"), 5)
    assert answer.choices[0].logprobs is None and answer.usage.completion_tokens == 5
    assert len(house.group.jobs) == 1, "without log-probabilities the prompt is prefilled as ever"
    texts = [complete(api, list(b"hi"), echo=True, n=2).choices[n].text for n in range(2)]
    assert texts == ["hi" + expected(ids("hi", bos=False), 5)] * 2
    nothing_left(house)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihood_of_lm_eval_is_answered(house: House, api: openai.OpenAI, max_tokens: int) -> None:
    prompts = [list(b"one more"), list("x€".encode())]
    answer = complete(api, prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234)
    assert not house.group.jobs, "prompts that are measured are prefilled densely, by the decode worker"
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        found = choice.logprobs
        count = len(prompt) + max_tokens
        assert [len(x) for x in (found.tokens, found.token_logprobs, found.top_logprobs)] == [count] * 3
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert found.token_logprobs[1 : len(prompt)] == [-token / 100 for token in prompt[1:]]
        for token, top in zip(found.tokens[1:], found.top_logprobs[1:], strict=True):
            assert max(top, key=top.get) == token, "it is greedy"
        assert choice.text.startswith(bytes(prompt).decode()) and choice.finish_reason == "length"
    assert answer.choices[1].logprobs.text_offset[:4] == [0, 1, 1, 1]
    assert answer.usage.completion_tokens == 2 * max_tokens
    assert answer.usage.prompt_tokens == len(prompts[0]) + len(prompts[1])
    nothing_left(house)


def test_bos_of_an_echoed_prompt_is_listed_as_a_token_without_text(api: openai.OpenAI) -> None:
    found = complete(api, "ab", echo=True, logprobs=0, max_tokens=0).choices[0]
    assert found.text == "ab"
    assert (found.logprobs.tokens, found.logprobs.text_offset) == (["<bos>", "a", "b"], [0, 0, 1])


def test_streamed_echo_equals_the_unstreamed_one(house: House, api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 3}
    whole = complete(api, "a long prompt", **asked).choices[0]
    chunks = [chunk.choices[0] for chunk in complete(api, "a long prompt", stream=True, **asked)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(whole.logprobs, name)


def test_prompt_logprobs_survive_a_worker_failure(house: House, api: openai.OpenAI) -> None:
    house.decode.fail_after = [2]
    found = complete(api, "hello", echo=True, logprobs=1).choices[0]
    assert len(found.logprobs.tokens) == 6 + 5
    assert found.text == "hello" + expected(ids("hello"), 5)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "n": 2}, "echo"),
        ({"echo": True, "extra_body": {"session_id": "d0.x"}}, "echo"),
        ({"echo": True, "logprobs": 1, "extra_body": {"session_ttl_s": 60}}, "echo"),
    ],
)
def test_refuses_unsupported_uses_of_echo_by_field(api: openai.OpenAI, given: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(api, **given)
    assert refused.value.param == param
