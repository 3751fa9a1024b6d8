"""Sampling options through OpenAI's client and gRPC's, as vLLM's users send them."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

from deltafront.service.client import DeltafrontClient
from deltafront.service.errors import InvalidArgument
from deltafront.workers.messages.events import Token

from ..inprocess import House
from .openai_calls import chat, complete

OPTIONS: dict[str, Any] = {
    "min_p": 0.25,
    "min_tokens": 2,
    "stop_token_ids": [7, 9],
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.25,
}


@pytest.mark.parametrize("ask", [chat, complete])
def test_sampling_options_reach_the_decode_worker(house: House, api: openai.OpenAI, ask: Any) -> None:
    ask(api, extra_body={**OPTIONS, "logit_bias": {"5": 1.5, "104": -100}})
    sampling = house.decode.jobs[-1].sampling
    wanted = {**OPTIONS, "stop_token_ids": (7, 9), "logit_bias": {5: 1.5, 104: -100}}
    assert {name: getattr(sampling, name) for name in wanted} == wanted


def test_grpc_client_sends_every_option(house: House, client: DeltafrontClient) -> None:
    list(client.generate("p", max_tokens=5, **OPTIONS, logit_bias={5: 1.5}))
    sampling = house.decode.jobs[-1].sampling
    wanted = {**OPTIONS, "stop_token_ids": (7, 9), "logit_bias": {5: 1.5}}
    assert {name: getattr(sampling, name) for name in wanted} == wanted
    with pytest.raises(InvalidArgument, match=r"logit_bias: 300 is no token id: they go from 0 to 257"):
        list(client.generate("p", logit_bias={300: 1}))


def test_repetition_penalty_sends_the_prompts_tokens_once(house: House, api: openai.OpenAI) -> None:
    complete(api, "abba", extra_body={"repetition_penalty": 1.1})
    sent = np.frombuffer(house.decode.jobs[-1].distinct_ids, "<u4").tolist()
    assert sent == [ord("a"), ord("b"), 256]
    complete(api, "abba", extra_body={"frequency_penalty": 1.1})
    assert not house.decode.jobs[-1].distinct_ids


def test_stop_token_ends_the_answer_and_has_no_text(house: House, api: openai.OpenAI) -> None:
    whole = complete(api, max_tokens=9).choices[0].text
    stop = next(letter for letter in whole[3:] if letter not in whole[:3])
    answer = complete(api, max_tokens=9, extra_body={"stop_token_ids": [ord(stop)], "ignore_eos": True})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")
    assert answer.usage.completion_tokens == whole.index(stop) + 1
    house.decode.fail_after = [2]
    assert complete(api, max_tokens=9, extra_body={"stop_token_ids": [ord(stop)]}).choices[0].text == (
        answer.choices[0].text
    )


def test_stop_string_ends_nothing_before_min_tokens(house: House, client: DeltafrontClient) -> None:
    def text(**options: Any) -> str:
        return "".join(e.text for e in client.generate("p", max_tokens=9, **options) if isinstance(e, Token))

    house.decode.script = list(b"axbxcxdxe")
    assert text(stop="x") == "a"
    assert text(stop="x", min_tokens=4) == "axbxc"


def test_model_defaults_may_have_min_p(house: House) -> None:
    from deltafront.service.request.check import model_sampling
    from deltafront.workers.messages.requests import Sampling

    found = model_sampling({"min_p": 0.1, "repetition_penalty": 1.1}, Sampling())
    assert found == Sampling(min_p=0.1)
